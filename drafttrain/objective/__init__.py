"""The training objective: divergences between drafter and target, and the scores of each prediction."""
