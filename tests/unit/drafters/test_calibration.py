"""Confidences that are off in a known way come back as probabilities that come true."""

from __future__ import annotations

import pytest
import torch

from drafttrain.drafters.common.calibration import PlattCalibration, expected_error

LINES = [(0.4, 1.0), (2.0, -0.5), (1.0, 0.0)]


def drawn(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and drafts accepted with the probability that the lines make of them; what is not reached is noise."""
    generator = torch.Generator().manual_seed(0)
    logit_MK = 2 * torch.randn(count, 3, generator=generator)
    p_MK = torch.stack([(scale * logit_MK[:, k] + shift).sigmoid() for k, (scale, shift) in enumerate(LINES)], 1)
    top1_MK = torch.rand(count, 3, generator=generator) < p_MK
    lost_MK = torch.cat([torch.zeros(count, 1, dtype=torch.bool), (~top1_MK).cumsum(1)[:, :-1] > 0], 1)
    return logit_MK, torch.where(lost_MK, torch.rand(count, 3, generator=generator) < 0.5, top1_MK)


def test_platt_calibration_fit_recovers_lines_from_reached_drafts() -> None:
    calibration, (logit_MK, top1_MK) = PlattCalibration(3), drawn(20000)
    acceptance_MK = (1.5 * logit_MK - 0.3).sigmoid()
    calibration.fit(logit_MK, top1_MK, acceptance_MK)
    for found, wanted in zip(calibration.lines[0], LINES, strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0.1, atol=0.1)
    torch.testing.assert_close(torch.tensor(calibration.lines[1]), torch.tensor([[1.5, -0.3]] * 3), rtol=0.02, atol=0.02)
    found = [c.acceptance_probability(logit_MK, False) for c in (PlattCalibration(3), calibration)]
    before, after = (expected_error(x_MK, top1_MK.float()) for x_MK in found)
    assert before is not None and after is not None and before > 0.08 and after < 0.015


def test_platt_calibration_few_samples_move_little_and_scale_stays_positive() -> None:
    calibration = PlattCalibration(2)
    calibration.fit(torch.tensor([[5.0, 5.0]]), torch.tensor([[True, True]]), torch.tensor([[0.9, 0.9]]))
    assert all(abs(scale - 1) < 0.2 and abs(shift) < 0.2 for line in calibration.lines for scale, shift in line)
    logit_MK = torch.linspace(-3, 3, 200)[:, None].expand(-1, 2)
    calibration.fit(logit_MK, logit_MK < 0, (logit_MK < 0).float())
    assert all(scale > 0 for line in calibration.lines for scale, _ in line)


def test_platt_calibration_settings_survive_reload_and_bfloat16_cast() -> None:
    calibration, again = PlattCalibration(3), PlattCalibration(3)
    calibration.fit(*drawn(500), torch.full((500, 3), 0.4))
    again.use(calibration.settings())
    assert again.to(torch.bfloat16).settings() == calibration.settings() and not again.state_dict()
    logit_MK = torch.randn(4, 2)
    ours_MK, theirs_MK = (c.acceptance_probability(logit_MK, False) for c in (again, calibration))
    torch.testing.assert_close(ours_MK, theirs_MK, rtol=0.02, atol=0.02)


def test_expected_error_opposite_deviations_do_not_cancel() -> None:
    sure = torch.tensor([[0.95]] * 4 + [[0.05]] * 4)
    assert expected_error(sure, torch.tensor([[1.0]] * 2 + [[0.0]] * 2 + [[1.0]] * 2 + [[0.0]] * 2)) == pytest.approx(0.45)
    assert expected_error(sure[:0], sure[:0]) is None
