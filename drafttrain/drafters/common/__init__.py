"""What several families share: trees that grow, pending positions, blocks, recurrent drafting."""
