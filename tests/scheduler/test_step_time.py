"""Predicted step times: what is learnt from a synthetic device, and what is given."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest

from scheduler.step_shape import StepShape
from scheduler.step_time import FittedStepTime, LinearStepTime, RooflineStepTime
from tests.scheduler.synthetic_device import BUCKETS, SyntheticDevice, mixed_steps, step_of

UNSEEN = mixed_steps(300, seed=99)


def teach(model: FittedStepTime, device: SyntheticDevice, num: int, seed: int = 1) -> None:
    for shape in mixed_steps(num, seed):
        model.observe(shape, device.run(shape))


def taught(device: SyntheticDevice, num: int = 1600) -> FittedStepTime:
    model = FittedStepTime(BUCKETS)
    teach(model, device, num)
    return model


def errors(model: FittedStepTime, device: SyntheticDevice) -> np.ndarray:
    """Relative errors against what unseen steps cost without noise."""
    return np.array([model.predict(shape) / device.seconds(shape) - 1 for shape in UNSEEN])


def test_steps_of_a_device_with_noise_are_predicted_within_a_few_percent():
    device = SyntheticDevice()
    model = taught(device)
    assert np.abs(errors(model, device)).mean() < 0.02
    assert np.abs(errors(model, device)).max() < 0.08
    assert model.p95_ratio == pytest.approx(1.05, abs=0.03), "what the noise does to one in twenty"


def test_a_model_is_ready_only_when_it_has_learnt():
    device, model = SyntheticDevice(), FittedStepTime(BUCKETS)
    assert not model.is_ready
    assert model.predict(UNSEEN[0]) > 0
    teach(model, device, FittedStepTime.LEARN_EVERY - 1)
    assert not model.is_ready
    teach(model, device, 1)
    assert model.is_ready
    assert np.abs(errors(model, device)).mean() < 0.3


def test_a_fit_of_a_log_is_as_good_and_knows_its_own_error():
    device = SyntheticDevice(pauses=0.01)
    samples = [(shape, device.run(shape)) for shape in mixed_steps(1600, seed=2)]
    model = FittedStepTime.fit(iter(samples), BUCKETS)
    assert np.abs(errors(model, device)).mean() < 0.02
    assert model.is_ready
    assert model.p95_ratio == pytest.approx(1.05, abs=0.03)


def test_a_fit_takes_steps_with_much_more_context_than_usual_for_no_pauses():
    device = SyntheticDevice(noise=0.01)
    shapes = [step_of(8, 0, 2_000_000 if n % 10 == 9 else 4000) for n in range(400)]
    model = FittedStepTime.fit([(shape, device.run(shape)) for shape in shapes], BUCKETS)
    for shape in shapes[-2:]:
        assert model.predict(shape) == pytest.approx(device.seconds(shape), rel=0.03)


def test_a_fit_of_too_few_steps_is_refused():
    with pytest.raises(ValueError, match="31 steps are too few; give at least 32"):
        FittedStepTime.fit([(step_of(1), 0.01)] * 31, BUCKETS)


def test_a_bucket_that_was_never_seen_is_interpolated():
    device, model = SyntheticDevice(noise=0.01), FittedStepTime(BUCKETS)
    for shape in mixed_steps(2000, seed=3):
        if not 128 < shape.num_tokens <= 256:
            model.observe(shape, device.run(shape))
    of_bucket = [step_of(8, prefill, 4000) for prefill in (130, 180, 240)]
    for shape in of_bucket:  # it departs from the line by up to 15 %, which nobody can know
        assert model.predict(shape) == pytest.approx(device.seconds(shape), rel=0.25)
    for _ in range(64):
        model.observe(of_bucket[0], device.run(of_bucket[0]))
    for shape in of_bucket:
        assert model.predict(shape) == pytest.approx(device.seconds(shape), rel=0.03)


def test_the_plain_costs_of_a_straight_device_are_found():
    model = FittedStepTime(BUCKETS)
    for shape in mixed_steps(3000, seed=4):
        bucket = model.buckets[model._find_bucket(shape.num_tokens, shape.num_rows)]
        tokens = 0 if bucket.decode_only else bucket.num_tokens
        seconds = 3e-3 + 10e-6 * tokens + 20e-6 * bucket.num_rows + 50e-9 * shape.context_tokens
        model.observe(shape, seconds)
    assert model.coefficients() == {
        "constant_s": pytest.approx(3e-3, rel=0.02),
        "per_prefill_token_s": pytest.approx(10e-6, rel=0.02),
        "per_decode_row_s": pytest.approx(20e-6, rel=0.05),
        "per_context_token_s": pytest.approx(50e-9, rel=0.02),
    }


@pytest.mark.parametrize("slowdown", [2.0, 0.5, 1.2])
def test_a_lasting_change_of_speed_is_followed_within_a_few_hundred_steps(slowdown):
    device = SyntheticDevice()
    model = taught(device)
    device.slowdown = slowdown
    assert np.abs(errors(model, device)).mean() > 0.15
    teach(model, device, 400, seed=5)
    assert np.abs(errors(model, device)).mean() < 0.1


def test_a_slower_device_is_followed_in_buckets_it_has_not_run_since():
    device = SyntheticDevice()
    model = taught(device)
    device.slowdown = 2.0
    for n in range(96):
        shape = step_of(6 + 6 * (n % 2), 0, 9000)
        model.observe(shape, device.run(shape))
    large = step_of(12, 900, 9000)
    assert model.predict(large) == pytest.approx(device.seconds(large), rel=0.1)


def test_one_bucket_that_became_slower_leaves_the_others_alone():
    device = SyntheticDevice()
    model = taught(device)
    slow, other = step_of(6, 0, 6000), step_of(30, 0, 30_000)
    for _ in range(200):
        model.observe(slow, 2 * device.run(slow))
        model.observe(other, device.run(other))
    assert model.predict(slow) == pytest.approx(2 * device.seconds(slow), rel=0.1)
    assert model.predict(other) == pytest.approx(device.seconds(other), rel=0.05)


def test_pauses_do_not_move_predictions_nor_the_p95():
    device = SyntheticDevice(pauses=0.02)
    model = taught(device)
    assert np.abs(errors(model, device)).mean() < 0.03
    assert model.p95_ratio < 1.15


def test_a_late_look_at_results_which_makes_the_next_step_seem_short_moves_nothing():
    """A host that stalls while two steps run sees a long step and then one of no time at all."""
    device = SyntheticDevice()
    model = taught(device)
    shape = step_of(8, 0, 4000)
    for n in range(64):
        model.observe(shape, {30: 0.3, 31: 20e-6}.get(n) or device.run(shape))
    assert model.predict(shape) == pytest.approx(device.seconds(shape), rel=0.02)
    assert np.abs(errors(model, device)).max() < 0.08


def test_such_a_look_among_the_very_first_steps_moves_little():
    device, model = SyntheticDevice(), FittedStepTime(BUCKETS)
    shape = step_of(8, 0, 4000)
    for n in range(32):
        model.observe(shape, {10: 0.3, 11: 20e-6}.get(n) or device.run(shape))
    assert model.predict(shape) == pytest.approx(device.seconds(shape), rel=0.1)


def test_noise_leaves_the_mean_of_predictions_right():
    device = SyntheticDevice(noise=0.3)
    model = taught(device, num=3000)
    mean_of_noise = np.exp(0.3**2 / 2)
    assert np.mean(1 + errors(model, device)) == pytest.approx(mean_of_noise, rel=0.03)


def test_a_new_bucket_is_known_at_once_however_wrong_the_first_idea_of_it():
    device, model = SyntheticDevice(), FittedStepTime(BUCKETS)
    large = step_of(4, 900, 2000)
    for _ in range(320):
        model.observe(step_of(4, 0, 2000), device.run(step_of(4, 0, 2000)))
    assert model.predict(large) < 0.3 * device.seconds(large), "no prompt has said what it costs"
    for n in range(32):
        shape = large if n == 0 else step_of(4, 0, 2000)
        model.observe(shape, device.run(shape))
    assert model.predict(large) == pytest.approx(device.seconds(large), rel=0.25)


def test_a_bucket_that_was_slow_once_and_is_avoided_since_is_given_another_chance():
    device, model = SyntheticDevice(noise=0.01), FittedStepTime(BUCKETS)
    avoided = step_of(4, 400, 2000)
    for _ in range(64):
        model.observe(avoided, 4 * device.run(avoided))
        model.observe(step_of(4, 0, 2000), device.run(step_of(4, 0, 2000)))
    assert model.predict(avoided) > 3 * device.seconds(avoided)
    for shape in mixed_steps(6000, seed=10):
        if not 256 < shape.num_tokens <= 512:
            model.observe(shape, device.run(shape))
    assert model.predict(avoided) == pytest.approx(device.seconds(avoided), rel=0.3)


def test_what_prompts_cost_is_remembered_through_a_long_time_without_any():
    device = SyntheticDevice()
    model = taught(device)
    for shape in mixed_steps(20_000, seed=11, decode_share=1.0):
        if not shape.prefill_tokens:
            model.observe(shape, device.run(shape))
    assert np.abs(errors(model, device)).max() < 0.3


def test_more_rows_pass_for_cheap_until_they_are_tried():
    """Or a cap on what runs, which predictions set, could keep them from ever being tried."""
    device, model = SyntheticDevice(), FittedStepTime(BUCKETS)
    for n in range(96):
        shape = step_of(0, 20, 0) if n % 32 == 0 else step_of(1, 0, 20 + n)
        model.observe(shape, device.run(shape))
    for rows in (4, 8, 16):
        assert model.predict(step_of(rows, 0, 100)) < 1.15 * device.seconds(step_of(rows, 0, 100))


def test_the_p95_ratio_bounds_what_nineteen_in_twenty_steps_take():
    device = SyntheticDevice(noise=0.15)
    model = taught(device)
    within = []
    for shape in mixed_steps(4000, seed=6):
        seconds = device.run(shape)
        within.append(seconds <= model.predict(shape) * model.p95_ratio)
        model.observe(shape, seconds)
    assert np.mean(within) == pytest.approx(0.95, abs=0.01)


def test_costs_are_never_negative_and_no_step_is_free():
    model = FittedStepTime(BUCKETS)
    for n, shape in enumerate(mixed_steps(640, seed=7)):
        # The more context, the faster; and a clock that stood still at first, and now and then.
        stood_still = n < 32 or n % 50 == 0
        model.observe(shape, 0.0 if stood_still else 0.02 / (1 + shape.context_tokens / 1e4))
    assert min(model.coefficients().values()) >= 0
    predictions = [model.predict(shape) for shape in UNSEEN]
    assert min(predictions) > 0
    assert np.isfinite(predictions).all()


ROOFLINE = RooflineStepTime(
    weight_bytes=16e9,
    kv_bytes_per_token=131_072,
    flops_per_token=16e9,
    flops_per_pair=500_000,
    hbm_bytes_per_s=4e12,
    flop_per_s=800e12,
    overhead_s=1e-4,
    efficiency=0.5,
)
LINEAR = LinearStepTime(
    constant_s=1e-3, per_prefill_token_s=1e-5, per_decode_row_s=1e-4, per_context_token_s=1e-7
)


@pytest.mark.parametrize("name", ["fitted", "roofline", "linear"])
def test_steps_that_only_decode_are_predicted_alike_one_by_one_and_all_at_once(name):
    model = {"roofline": ROOFLINE, "linear": LINEAR}.get(name) or taught(SyntheticDevice(), 640)
    contexts = np.array([0, 7, 1000, 60_000])
    for rows in (1, 5, 64):
        one_by_one = [model.predict(step_of(rows, 0, int(context))) for context in contexts]
        assert model.predict_decodes(rows, contexts) == pytest.approx(one_by_one, rel=1e-12)


def test_the_roofline_is_memory_for_decodes_and_compute_for_prompts():
    # (16e9 + 131,072 x 10,000) bytes at 4e12 / s and half of that: 8.65536 ms, and 0.1 ms.
    assert ROOFLINE.predict(step_of(8, 0, 10_000)) == pytest.approx(8.75536e-3)
    # 2,000 tokens x 16e9 + 2,001,000 pairs x 5e5 = 3.30005e13 FLOPs at half of 800e12 / s.
    assert ROOFLINE.predict(step_of(0, 2000)) == pytest.approx(82.50125e-3 + 1e-4)


def test_the_linear_model_is_the_sum_of_its_parts():
    shape = StepShape(3, 2, 100, 5000, 777)
    assert LINEAR.predict(shape) == pytest.approx(1e-3 + 1e-3 + 2e-4 + 5e-4)


def test_to_learn_and_to_predict_costs_microseconds():
    """A generous bound: the goal is 8 us on a quiet core, solving included."""
    model = FittedStepTime(BUCKETS)
    rounds = []
    for _ in range(7):
        begin = time.thread_time()  # what other processes take does not count
        for shape in UNSEEN:
            model.observe(shape, 0.01)
            model.predict(shape)
        rounds.append((time.thread_time() - begin) / len(UNSEEN))
    assert statistics.median(rounds) < 60e-6
