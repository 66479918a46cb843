"""Pitfalls seen in public engines, and the tests that show that this one avoids them.

`TESTS` and `ELSEWHERE` have the pitfalls in the order of the scheduler's specification: those that
one rank on a CPU can show, with the tests that do, and the others, with the reason.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS: dict[str, tuple[str, ...]] = {
    "slot reused while the running step reads its row": (
        "pitfalls_release::test_request_admitted_beside_an_overrun_gets_nothing_of_its",
    ),
    "scheduler queue overwrites shared device tables": (
        "fake_device::test_device_state_is_written_on_the_forward_queue_alone",
        "pitfalls_release::test_a_plan_shares_no_memory_with_the_books",
    ),
    "pinned buffer reused before the copy ended": (
        "fake_device::test_ring_slots_are_poisoned_when_their_step_is_through",
        "fake_device::test_results_are_poisoned_when_their_slot_is_taken_again",
        "worker::test_a_place_in_use_is_not_taken_again",
    ),
    "finished request freed under the extra step": (
        "pitfalls_release::test_stop_that_is_settled_with_the_next_step_launched_is_the_end",
    ),
    "abort during finish frees twice": (
        "loop_faults::test_abort_at_any_point_of_the_loop_ends_one_request_alone",
        "scheduler::test_a_generation_is_released_once",
    ),
    "ring of pending tokens wraps": (
        "pitfalls_release::test_64_requests_whose_40_prefill_steps_come_first_drain_to_nothing",
    ),
    "blocks reallocated to a network receive": (
        "pitfalls_release::test_random_late_writers_never_touch_blocks_of_others",
    ),
    "zombie rows write after free": (
        "pitfalls_release::test_stop_that_is_settled_with_the_next_step_launched_is_the_end",
        "scheduler::test_non_finite_overrun_of_a_finished_request_is_quarantined_too",
    ),
    "accept counts read early": (
        "loop::test_late_copy_of_results_holds_up_their_settlement_and_no_launch",
        "fake_device::test_result_is_not_read_before_its_copy_is_done",
    ),
    "sampler sees host lists that move": (
        "fake_device::test_input_is_frozen_once_it_is_launched",
        "worker::test_nothing_of_a_plan_is_read_after_launch",
    ),
    "guard present only in the overlapped variant": (
        "loop::test_output_does_not_depend_on_depth_or_drafts",
    ),
    "placeholder reaches the embedding": (
        "pitfalls_memory::test_row_that_was_left_out_of_steps_goes_on_from_settled_tokens",
        "worker::test_an_illegal_id_of_the_host_is_a_bad_source",
    ),
    "ledger underflow on preemption": (
        "scheduler::test_preempted_requests_continue_exactly",
        "pitfalls_memory::test_every_state_of_every_block_adds_up_while_memory_is_short",
    ),
    "valid late tokens dropped, work multiplies": (
        "pitfalls_memory::"
        "test_tokens_in_flight_at_a_preemption_are_delivered_and_not_computed_again",
    ),
    "window state dropped on optimistic length": (
        "pitfalls_speculation::test_windows_outlive_drafts_that_are_all_refused",
        "verify_budget::test_blocks_are_reserved_for_every_length_that_the_device_may_choose",
    ),
    "settlement touches a sequence without blocks": (
        "pitfalls_memory::test_preempted_request_keeps_its_blocks_until_its_step_is_settled",
        "pitfalls_memory::test_request_that_ends_while_it_is_being_preempted_does_not_come_back",
    ),
    "overshoot tokens in the cache key": (
        "pitfalls_cache::test_next_turn_finds_all_that_was_said_and_nothing_behind_the_stop",
    ),
    "cap hides an earlier stop": (
        "pitfalls_speculation::test_stop_before_the_cap_in_a_run_past_it_is_the_end",
    ),
    "first stop in list order wins": (
        "pitfalls_speculation::test_first_of_two_stops_in_a_run_is_the_end_whatever_their_ids",
        "scheduler::test_first_stop_in_position_order_ends_an_accepted_run",
    ),
    "ids run past the stop": (
        "pitfalls_speculation::test_ids_logprobs_and_counts_tell_of_the_same_tokens",
        "outputs::test_every_output_covers_whole_tokens_with_their_logprobs",
    ),
    "usage charged per block of drafts": ("scheduler::test_cap_cuts_an_accepted_run",),
    "accuracy drop at one draft depth only": (
        "pitfalls_speculation::test_output_is_the_same_for_every_number_of_drafts",
        "pitfalls_speculation::"
        "test_output_is_the_same_for_every_number_of_drafts_whatever_is_verified",
    ),
    "hang while the batch drains with adaptive verify": (
        "pitfalls_speculation::test_64_requests_whose_drafts_are_trimmed_drain_to_nothing",
    ),
    "NaN gives an unset index": (
        "pitfalls_speculation::test_row_of_drafts_that_is_not_finite_ends_its_request_alone",
        "worker::test_a_draft_that_is_not_finite_and_refused_harms_nobody",
        "verify_budget::test_sequence_that_is_not_finite_in_a_trimmed_step_ends_alone",
        "worker::test_tokens_do_not_depend_on_which_drafts_are_verified",
    ),
    "output changes with speculation on": (
        "worker::test_logits_of_verify_rows_are_those_of_decoding_one_by_one",
        "worker::test_tokens_do_not_depend_on_drafts_or_overlap",
        "worker::test_tokens_do_not_depend_on_which_drafts_are_verified",
        "verify_budget::test_output_is_the_same_for_every_budget",
    ),
    "seed ignored or global generator": (
        "llm::test_given_seed_is_used_as_it_is",
        "llm::test_seeds_are_derived_from_the_engine_seed_and_the_number_of_the_request",
        "sampling::test_noise_comes_from_seed_position_stream_cycle_and_token",
    ),
    "seeded output changes after preemption": (
        "pitfalls_memory::test_output_is_the_same_for_a_preemption_at_any_position",
        "engine::test_strict_output_is_equal_with_preemption",
    ),
    "noise tied to sorted rank": (
        "sampling::test_noise_stays_with_the_token_when_near_ties_change_places",
    ),
    "leak on overlap and retraction with blocks of several tokens": (
        "scheduler_properties::SchedulerMachine",
    ),
    "length inferred in one place, freed in another": (
        "pitfalls_release::test_every_block_that_was_taken_is_given_back_once",
    ),
    "allocation fails at the edge of the pool": (
        "pitfalls_memory::test_request_that_fits_to_the_last_position_completes_for_any_drafts",
        "pitfalls_speculation::"
        "test_request_that_fits_to_the_last_position_completes_for_any_budget",
        "pitfalls_memory::test_request_that_needs_one_block_more_than_there_is_ends_alone",
        "scheduler::test_impossible_requests_are_refused_at_once",
    ),
    "token shown after cancel": (
        "loop_faults::test_abort_before_the_first_token_is_settled_shows_none",
        "scheduler::test_abort_between_plan_and_settle_wins_over_the_tokens",
    ),
    "chunk progress tied to cache insertion": (
        "pitfalls_cache::test_progress_of_five_chunks_does_not_depend_on_the_cache",
    ),
    "abort during transfer leaks or corrupts": (
        "pitfalls_release::test_blocks_under_transfer_are_kept_until_its_completion",
        "pitfalls_release::test_completion_that_is_lost_ends_with_the_lease",
    ),
    "fenced blocks cause a preemption cascade": (
        "pitfalls_memory::test_blocks_of_a_victim_under_transfer_cost_no_second_victim",
        "scheduler::test_blocks_on_their_way_back_are_counted_before_another_victim_is_chosen",
    ),
    "preempt and resume thrash": (
        "pitfalls_memory::test_two_long_prompts_in_a_small_pool_take_turns_without_thrashing",
        "scheduler::test_preempted_request_waits_until_all_of_it_and_a_block_fit",
    ),
    "one request fills the pool": (
        "scheduler::test_request_that_outgrows_the_cache_alone_ends_with_cache_exhausted",
    ),
    "schedule computed before the prefix hit": (
        "pitfalls_cache::test_preempted_request_that_comes_back_finds_what_it_had",
    ),
    "fully cached prompt": (
        "pitfalls_cache::test_prompt_that_is_known_as_a_whole_computes_at_least_a_token",
    ),
    "stale row index after resume": (
        "verify_budget::test_a_request_that_comes_back_is_unknown_until_it_has_told_something",
        "pitfalls_memory::test_row_that_was_left_out_of_steps_goes_on_from_settled_tokens",
    ),
    "token list truncated before recovery": (
        "pitfalls_memory::test_recompute_that_is_preempted_between_its_chunks_loses_nothing",
    ),
    "first token after resume dropped": (
        "loop::test_paused_loop_settles_what_runs_and_loses_no_token_when_it_goes_on",
    ),
    "old output applied to reused id": (
        "verify_budget::test_a_request_in_the_slot_of_another_is_unknown",
        "loop_faults::test_cancelled_id_used_again_gets_nothing_of_the_old_request",
    ),
    "disconnected client keeps decoding": (
        "loop_faults::test_client_that_is_gone_stops_computing_within_one_iteration",
        "llm::test_closing_a_stream_aborts_it_and_the_engine_serves_on",
    ),
    "cancelled-id set grows": (
        "pitfalls_release::test_100_000_cancels_leave_nothing_behind",
        "pitfalls_release::test_cancels_of_running_requests_leave_nothing_behind",
    ),
    "cleanup only when new work is scheduled": (
        "pitfalls_release::test_blocks_come_back_though_nothing_can_be_scheduled",
    ),
    "flush refused or idle misjudged": (
        "loop::test_rank_is_idle_when_nothing_is_in_flight_and_nothing_can_be_planned",
        "loop::test_flush_leaves_nothing_in_flight_and_loses_nothing",
    ),
    "duplicate block freed while named": (
        "pitfalls_cache::test_equal_prompts_of_one_step_keep_their_own_blocks_until_they_end",
    ),
    "window pool leaks or starves": (
        "pitfalls_cache::test_stored_window_states_starve_no_request_of_its_slot",
    ),
    "hit reads a stale window": (
        "pitfalls_cache::test_windows_behind_a_hit_are_those_of_the_prompt",
    ),
    "cache silently never hits": (
        "pitfalls_cache::test_shares_of_prompts_that_are_found_on_a_fixed_trace",
    ),
    "warm differs from cold": (
        "pitfalls_cache::test_warm_strict_request_has_the_bits_of_a_cold_one",
        "pitfalls_cache::test_strict_request_resumes_from_stored_windows_and_says_the_same",
    ),
    "stale key on a recycled block": (
        "pitfalls_cache::test_prefix_that_was_evicted_is_not_found_and_its_blocks_serve_others",
        "prefix_index::test_keys_go_before_their_blocks_become_free",
    ),
    "matcher advanced after end": (
        "pitfalls_grammar::test_grammar_is_not_advanced_by_the_step_behind_its_end",
        "pitfalls_grammar::test_end_of_the_grammar_is_the_end_of_the_output_anywhere_in_a_run",
    ),
    "illegal draft accepted": (
        "pitfalls_grammar::test_illegal_draft_at_any_offset_of_a_run_is_not_accepted",
        "verify_budget::test_masks_are_made_for_all_drafts_that_may_be_verified",
        "worker::test_masks_of_drafts_that_are_left_out_do_no_harm",
    ),
    "grammar ignored after think end inside a run": (
        "pitfalls_grammar::test_grammar_that_begins_inside_a_run_holds_from_there_on",
    ),
    "grammar error changes collectives": (
        "pitfalls_grammar::test_broken_grammar_ends_its_request_and_its_row_stays_in_the_step",
    ),
    "penalties without effect": (
        "engine::test_penalties_count_committed_tokens_once",
        "worker::test_penalties_see_the_drafts_before_a_row",
    ),
    "processor sees placeholders": (
        "pitfalls_grammar::test_grammar_stands_at_the_committed_tokens_after_every_settlement",
    ),
    "logprobs crash or switch overlap off": (
        "loop::test_host_work_shorter_than_a_step_costs_the_device_nothing",
    ),
    "NaN row served as text": (
        "loop_faults::test_values_that_are_not_finite_end_one_request_alone",
        "loop_faults::test_prompt_that_was_not_finite_is_no_prefix_for_others",
    ),
    "batch size changes text": (
        "engine::test_strict_output_is_equal_alone_and_in_a_batch_of_17",
    ),
    "cost model fitted on a cold sample": (
        "bench_startup::test_runs_that_warm_up_do_not_count",
    ),
    "one blocking copy per step": (
        "loop::test_steady_iteration_waits_once_and_makes_no_buffer",
    ),
    "overlap is on but nothing overlaps": (
        "loop::test_host_work_shorter_than_a_step_costs_the_device_nothing",
        "loop::test_host_work_of_the_serial_loop_leaves_the_device_idle",
    ),
    "tail chunk runs alone": ("scheduler::test_tail_of_a_prompt_shares_its_step_with_the_next",),
}  # fmt: skip

GROUP = "ranks of a group agree; there is one rank"
ELSEWHERE: dict[str, str] = {
    "captured copy keeps a recycled host address": "graphs are captured on accelerators alone",
    "verify budget differs per rank": GROUP,
    "local overlap decision": GROUP,
    "local forced decode": GROUP,
    "zero-token step skips a collective": GROUP,
    "empty step with stale metadata, unsupported shape or unknown mode": GROUP,
    "device read on a branch only some ranks take": GROUP,
    "delay rule locks ranks out of phase": GROUP,
    "stale or incomplete load signal": "balancers are outside an engine",
    "expert map and weights swap separately": "experts are not moved while an engine runs",
}


@pytest.mark.parametrize("pitfall", TESTS)
def test_pitfall_has_a_test(pitfall: str) -> None:
    for name in TESTS[pitfall]:
        file, _, test = name.partition("::")
        text = (Path(__file__).parent / f"test_core_{file}.py").read_text(encoding="utf-8")
        assert re.search(rf"^(def|class) {test}\b", text, re.MULTILINE), f"{name} is not there"


def test_no_pitfall_stands_in_both_tables() -> None:
    assert not TESTS.keys() & ELSEWHERE.keys()
