"""What TensorRT-LLM's V2 manager with DSA promises, row by row, and which tests show it here.

A row that does not apply says why. Numbers and names are those of its published feature list; a test is named by file
and function, without the parameters.
"""

from __future__ import annotations

from typing import NamedTuple


class Feature(NamedTuple):
    """One promise. `tests` show it; where there are none, `why_not` says why it does not apply."""

    number: int
    name: str
    tests: tuple[str, ...] = ()
    why_not: str = ""


FEATURES = (
    Feature(
        1,
        "per-layer buffers by role, unique in a layer",
        (
            "test_layout.py::test_bytes_per_token_of_61_layers",
            "test_sizing.py::test_items_name_every_page_once_and_add_up",
        ),
    ),
    Feature(
        2,
        "layers of equal window and sinks form a group",
        ("test_window_sizing.py::test_groups_are_layers_that_read_alike_on_either_side",),
    ),
    Feature(
        3,
        "equal pages of all layers side by side in one pool",
        (
            "test_layout.py::test_offsets_in_a_coalesced_pool",
            "test_pool.py::test_every_page_belongs_to_one_layer_of_one_block",
        ),
    ),
    Feature(
        4,
        "one id allocator over the pools of a group",
        (
            "test_tiers.py::test_case_H4_a_block_is_one_unit",
            "test_manager_windows.py::test_case_E2_all_groups_of_all_rows_grow_or_none",
        ),
    ),
    Feature(
        5,
        "smaller pages of a role inside a block",
        (
            "test_subpages.py::test_case_C4_an_indexer_with_smaller_pages_finds_its_own_layout",
            "test_subpages.py::test_a_split_table_names_each_part_and_null_pages_stay_in_the_null_block",
        ),
    ),
    Feature(
        6,
        "page index = block * scale, layer offset in the base",
        ("test_pool.py::test_a_layers_view_puts_scaled_pages_where_the_design_works_them_out",),
    ),
    Feature(7, "page indices seen from the pool's base", ("test_layout.py::test_offsets_in_a_coalesced_pool",)),
    Feature(
        8,
        "helpers for scale, offset, stride and bound of page indices",
        (
            "test_layout.py::test_offsets_in_a_coalesced_pool",
            "test_pool.py::test_every_page_belongs_to_one_layer_of_one_block",
        ),
    ),
    Feature(
        9,
        "ids written in place into the caller's row",
        why_not="The block table itself is public (`ManagerV2.block_table`), written in place, and its changes "
        "leave by "
        "the journal: there is no second buffer to hand in.",
    ),
    Feature(
        10,
        "committed <= length <= capacity",
        (
            "test_manager_v2.py::test_extend_reserves_and_advance_moves",
            "test_manager_content.py::test_a_commit_beyond_the_row_is_refused_and_another_owners_is_skipped",
        ),
    ),
    Feature(
        11,
        "growth of length and capacity, all or nothing",
        (
            "test_manager_v2.py::test_case_E2_a_refused_extend_changes_nothing_and_succeeds_after_a_free",
            "test_manager_v2.py::test_case_G3_a_block_freed_by_a_rewind_waits_for_the_step_that_wrote_it",
        ),
    ),
    Feature(
        12,
        "full blocks become immutable and findable",
        (
            "test_manager_content.py::test_case_F2_what_its_owner_is_still_writing_is_not_found",
            "test_manager_content.py::test_case_F2_the_same_ids_with_other_content_never_match",
        ),
    ),
    Feature(
        13,
        "equal full blocks are merged",
        (
            "test_manager_content.py::test_equal_blocks_are_merged_once_both_are_full",
            "test_manager_content.py::test_a_merge_waits_for_room_in_the_journal",
        ),
    ),
    Feature(
        14,
        "keys chained under a scope",
        (
            "test_prefix.py::test_golden_keys",
            "test_prefix.py::test_case_F1_every_field_is_told_apart",
            "test_manager_content.py::test_case_F1_a_hit_needs_every_field_and_the_tokens_themselves",
        ),
    ),
    Feature(
        15,
        "part of a block is reused by a copy, whatever the number of siblings",
        (
            "test_manager_content.py::test_case_F2_a_partial_hit_is_a_copy_and_the_shared_block_keeps_its_bytes",
            "test_manager_content.py::test_partial_reuse_finds_the_best_of_many_siblings",
        ),
    ),
    Feature(
        16,
        "blocks that are not full stay findable, and a longer one takes their place",
        why_not="Only full blocks are findable. What a last block holds of a sequence that ended, at most a "
        "block less one "
        "token, is computed again; in return nothing that is findable is ever written.",
    ),
    Feature(
        17,
        "a match gives up its last tokens, for drafts that read ahead",
        ("test_manager_content.py::test_a_match_gives_up_the_tokens_that_drafts_read_ahead",),
    ),
    Feature(
        18,
        "length of a match without taking it",
        ("test_manager_content.py::test_case_F3_at_most_all_but_the_last_token_is_reused",),
    ),
    Feature(
        19,
        "a handle that drops a sequence's findable blocks later",
        (
            "test_manager_drops.py::test_a_plan_forgets_what_nobody_needs_and_can_be_dropped_once",
            "test_manager_drops.py::test_what_another_plan_names_survives",
        ),
    ),
    Feature(
        20,
        "reuse by request or conversation",
        why_not="A policy of a server. `open(..., match=False)`, `Scope(salt=...)` and `plan_drop` express each of "
        "the three.",
    ),
    Feature(
        21,
        "of a committed sequence only the pages that a continuation reads are kept",
        (
            "test_manager_windows.py::test_the_last_blocks_alone_serve_who_continues_behind_them",
            "test_manager_windows.py::test_blocks_that_went_stale_are_found_by_a_sequence_that_ends_there",
        ),
    ),
    Feature(
        22,
        "blocks behind a window are given up",
        (
            "test_manager_windows.py::test_case_E4_a_stale_block_is_handed_out_once_the_replay_that_reads_it_retired",
            "test_window_sizing.py::test_the_first_column_is_that_of_trtllms_stale_ranges",
        ),
    ),
    Feature(
        23,
        "blocks of a prefill that a window leaves behind share memory",
        why_not="A prefill goes in chunks, and what a window leaves behind is free again when its chunk has "
        "retired: it takes "
        "a chunk's blocks at most (`test_window_sizing.py::test_a_long_sequence_needs_little_of_a_window`).",
    ),
    Feature(24, "one private page of recurrent state a request", why_not="No DSA model has recurrent layers."),
    Feature(
        25,
        "device, host and disk",
        (
            "test_tiers.py::test_every_format_comes_back_whole",
            "test_disk.py::test_what_is_stored_is_loaded",
        ),
    ),
    Feature(
        26,
        "eviction cascades, blocks come back, events order it",
        (
            "test_manager_tiers.py::test_the_next_ones_to_go_have_a_copy_before_their_room_is_needed",
            "test_transfer_order.py::test_any_order_that_events_allow_gives_what_sequence_gives",
            "test_runtime_tiers.py::test_tokens_and_bytes_are_those_of_a_runtime_where_nothing_moves",
        ),
    ),
    Feature(27, "prefetch hint", ("test_runtime_tiers.py::test_prefetch_makes_an_open_find_it_on_the_device",)),
    Feature(
        28,
        "eviction by priority, then least recently used",
        (
            "test_manager_content.py::test_eviction_goes_by_priority_then_age_then_depth_and_never_cuts_a_chain",
            "test_manager_content.py::test_the_highest_priority_that_touches_a_block_counts",
        ),
    ),
    Feature(
        29,
        "suspend and resume, gated by utilisation",
        (
            "test_manager_tiers.py::test_suspend_and_resume_bring_a_row_back_into_other_blocks",
            "test_manager_tiers.py::test_what_cannot_complete_is_refused_before_anything_changed",
            "test_cases_blocks.py::test_a_suspended_row_costs_no_device_block",
        ),
    ),
    Feature(
        30,
        "a sequence moves to another stream",
        why_not="All steps of a runtime run on its one stream; the mover's streams follow it by events.",
    ),
    Feature(
        31,
        "tiers change their size",
        (
            "test_runtime_growth.py::test_case_A3_captured_graphs_go_on_through_growth_and_shrinking",
            "test_runtime_growth.py::test_what_is_cached_in_blocks_that_go_is_evicted_with_what_builds_on_it",
        ),
    ),
    Feature(
        32,
        "memory is split between groups by stated needs",
        ("test_window_sizing.py::test_a_budget_is_split_and_used",),
    ),
    Feature(
        33,
        "memory is split anew as the load changes",
        why_not="A block is all roles of both sides, so a model without windows has one kind of block and "
        "nothing to balance; "
        "with windows the need of each group is known from the load that is stated.",
    ),
    Feature(34, "longest sequence that fits", ("test_sizing.py::test_the_longest_sequence_beside_others",)),
    Feature(
        35,
        "statistics",
        (
            "test_manager_content.py::test_case_E3_counts_stay_true_while_cached_blocks_make_room",
            "test_runtime_tiers.py::test_without_room_for_a_cold_match_its_tokens_are_computed_again_and_counted_so",
            "test_runtime_stats.py::test_counts_by_tier_and_role_add_up",
            "test_runtime_stats.py::test_a_request_knows_where_its_tokens_came_from_also_when_it_is_over",
        ),
    ),
    Feature(
        36,
        "events",
        (
            "test_manager_content.py::test_events_are_numbered_bounded_and_tell_of_gaps",
            "test_runtime_stats.py::test_events_tell_in_which_tier_content_is",
        ),
    ),
    Feature(
        37,
        "contiguous ranges of listed blocks, for transfers to other machines",
        ("test_tiers.py::test_unit_is_every_pool_of_a_block",),
    ),
    Feature(
        38,
        "tokens that stand for other content",
        ("test_prefix.py::test_different_contents_of_the_same_tokens_have_different_keys",),
    ),
    Feature(
        39,
        "roles of keys, values and their scales",
        why_not="An MLA layer has one latent for both, and a record holds its scales: the roles are latent and "
        "index_k.",
    ),
    Feature(
        40,
        "a request keeps its line in every table",
        ("test_runtime.py::test_sequences_that_join_and_leave_write_their_own_bytes_and_no_others",),
    ),
    Feature(
        41,
        "tables of a batch reach the device in one upload",
        (
            "test_step_nodes.py::test_latch_fills_every_field_of_live_and_padded_rows",
            "test_packet.py::test_a_packet_says_what_was_asked_for_after_any_packet_before",
        ),
    ),
    Feature(
        42,
        "what a scheduler asks for: room, revert, suspend, resume",
        (
            "test_manager_v2.py::test_case_I3_growth_for_a_skipped_step_does_not_creep",
            "test_runtime_tiers.py::test_a_suspended_sequence_comes_back_and_goes_on_while_others_step",
        ),
    ),
    Feature(
        43,
        "rows that pad a graph",
        ("test_cases_runtime.py::test_case_C1_padded_rows_write_nowhere",),
    ),
    Feature(
        44,
        "draft layers beside the target's",
        (
            "test_layout.py::test_the_draft_side_counts_apart",
            "test_step_nodes.py::test_derive_fills_another_side_and_leaves_the_target_alone",
            "test_sizing.py::test_case_I1_estimate_counts_indexer_and_draft_and_stays_in_the_quota",
        ),
    ),
    Feature(
        45,
        "rejected drafts give capacity back",
        (
            "test_manager_v2.py::test_settle_keeps_lengths_true_while_the_next_step_is_in_flight",
            "test_manager_v2.py::test_a_rewind_gives_up_the_reserve_too_and_a_listener_that_raises_comes_too_late_to_harm",
        ),
    ),
    Feature(
        46,
        "blocks from tokens, bytes, or a share of free memory",
        (
            "test_sizing.py::test_blocks_for_tokens_counts_the_null_block",
            "test_sizing.py::test_blocks_in_a_share_of_free_memory",
        ),
    ),
    Feature(
        47,
        "size of the host tier",
        (
            "test_tiers.py::test_case_I2_host_memory_is_what_was_asked_for",
            "test_tiers.py::test_host_tier_that_the_system_does_not_give",
        ),
    ),
    Feature(
        48,
        "index K is allocated, reused and evicted with the latent",
        (
            "test_tiers.py::test_case_H4_a_block_is_one_unit",
            "test_cases_blocks.py::test_case_H4_a_block_without_one_of_its_parts_is_a_miss",
        ),
    ),
    Feature(
        49,
        "FP8 index K, 132 bytes a token",
        (
            "test_layout.py::test_index_k_bytes",
            "test_ops_bytes.py::test_case_D1_scales_stand_behind_all_values_of_the_page",
        ),
    ),
    Feature(
        50,
        "FP4 index K, 68 bytes a token",
        (
            "test_layout.py::test_index_k_bytes",
            "test_ops_bytes.py::test_store_index_k_puts_the_worked_position_where_the_golden_vector_says",
        ),
    ),
    Feature(
        51,
        "layers that share a top-k own no index K",
        (
            "test_layout.py::test_a_layer_that_shares_a_topk_adds_no_index_bytes",
            "test_transformers.py::test_shared_layers_own_no_index_bytes_and_reuse_the_selection",
        ),
    ),
    Feature(
        52,
        "byte offsets of each new token's values and scales",
        (
            "test_layout.py::test_offsets_of_the_worked_position",
            "test_step_nodes.py::test_latch_fills_every_field_of_live_and_padded_rows",
        ),
    ),
    Feature(
        53,
        "scatter and gather, bit exact",
        (
            "test_ops_bytes.py::test_store_index_k_writes_the_row_and_nothing_else",
            "test_ops_bytes.py::test_case_D2_gather_index_k_copies_the_rows_and_nothing_else",
        ),
    ),
    Feature(
        54,
        "prefill in chunks",
        (
            "test_step_nodes.py::test_ragged_prefill_batch",
            "test_runtime.py::test_sequences_that_join_and_leave_write_their_own_bytes_and_no_others",
        ),
    ),
    Feature(
        55,
        "gather over cached prefixes",
        (
            "test_runtime_reuse.py::test_a_sequence_that_begins_alike_feeds_the_rest_only",
            "test_ops_bytes.py::test_case_D2_gather_finds_the_row_of_each_token",
        ),
    ),
    Feature(
        56,
        "paged logits, any number of query tokens",
        (
            "test_ops_select.py::test_paged_index_logits_scores_each_context_and_touches_nothing_else",
            "test_ops_index_logits.py::test_tokens_of_a_row_share_its_pages",
        ),
    ),
    Feature(
        57,
        "top-k",
        ("test_ops_select.py::test_topk_is_exact", "test_ops_select.py::test_topk_breaks_ties_by_lowest_position"),
    ),
    Feature(
        58,
        "short sequences select everything",
        ("test_ops_select.py::test_topk_is_exact",),
    ),
    Feature(59, "positions become token slots, -1 stays", ("test_ops_select.py::test_topk_is_exact",)),
    Feature(
        60,
        "one translation for the layers that share a selection",
        ("test_transformers.py::test_shared_layers_own_no_index_bytes_and_reuse_the_selection",),
    ),
    Feature(
        61,
        "the draft side is bound while its part is captured, and given back",
        ("test_metadata.py::test_sides_are_disjoint_and_restored_also_after_an_error",),
    ),
    Feature(
        62,
        "latent records with their scales, 656 bytes",
        ("test_codecs.py::test_a_ds_mla_record_by_hand", "test_layout.py::test_latent_bytes_at_the_standard_widths"),
    ),
    Feature(
        63,
        "captured batch sizes and padding",
        (
            "test_runtime.py::test_replay_equals_eager_byte_for_byte",
            "test_cases_runtime.py::test_case_C1_padded_rows_write_nowhere",
        ),
    ),
    Feature(
        64,
        "a guard page for masked entries, and poisoned free blocks",
        (
            "test_pool.py::test_the_null_block_is_patterned_and_reads_as_tiny_numbers",
            "test_runtime_stats.py::test_self_check_poisons_what_is_free_and_finds_who_wrote_there",
        ),
    ),
    Feature(
        65,
        "two sets of staging",
        ("test_cases_runtime.py::test_case_B1_a_stalled_stream_still_reads_each_steps_own_packet",),
    ),
    Feature(
        66,
        "a step's metadata in few launches",
        (
            "test_step_nodes.py::test_any_run_of_steps_leaves_what_plain_loops_say",
            "test_runtime_windows.py::test_a_model_without_windows_has_no_more_nodes_than_before",
        ),
    ),
)
