"""Every failure seen in the field and every threat (docs/inside/hazards.md), and the tests that prove our answer.

A row is named in a few words of our own. Tests are named as in `protocol_rows`: `file::test` in tests/scenarios, others
with their room, and with a bare `/` where they stand in none. Where our answer is not the proposed one, a comment
beside the row says what was decided instead.
"""

from __future__ import annotations

Tests = tuple[str, ...]

REPLAYED = "background::test_stored_response_of_a_lost_socket_is_replayed_without_gap_or_repeat"
SILENCE = "connections::test_silence_is_broken_by_heartbeats_on_socket_and_sse"
LIMITS = "hazards::test_limits_are_those_that_the_field_has_taught"
ANSWERED = "connections::test_whatever_ends_a_connection_every_create_is_answered_first"
UNREAD = "connections::test_socket_reader_that_never_reads_slows_the_model_and_is_cut"
STORIES = "clients/stories::test_client_recovers_or_ends_with_words_that_it_understands"
MATRIX = ("isolation::test_matrix_over_http", "isolation::test_matrix_over_sockets")
CANARIES = "canaries::test_unstored_turns_and_keys_leave_no_trace"
STORM = "hazards::test_storm_of_leaving_clients_mixes_no_owners"
KEYLESS = "keys::test_request_without_a_key_with_a_wrong_one_or_a_revoked_one_is_refused"
REVOKED = (
    "keys::test_revoked_key_finishes_its_turn_and_then_loses_its_socket",
    "keys::test_revoked_key_is_refused_on_its_open_socket",
    "keys::test_waiting_rollout_of_a_revoked_key_ends",
)
LEFT = "connections::test_unstored_turn_ends_within_a_second_however_its_client_leaves"

FAILURES: dict[str, Tests] = {
    "F1 turn given up while the model thinks in silence": (
        SILENCE,
        "transports::test_heartbeats_are_numbered_events_of_the_turn_on_each_transport",
        "protocol_section_10::test_section_10_row_13_text_frames_break_every_silence",
        # With the real clients, Codex included, against an engine that is slow to begin.
        STORIES,
        LIMITS,
    ),
    # A create that waits in its lane is silent until its turn.
    "F2 silence before the response has an id": (
        "process/runner::test_client_hears_first_and_then_the_engine_is_asked",
        "process/runner::test_silent_engine_is_covered_by_heartbeats",
    ),
    # Streams carry numbered heartbeats instead of comment lines. Proxies' settings: docs/deploy.md.
    "F3 proxies and CDNs cut what is silent": (
        SILENCE,
        LIMITS,
        "listener/socket::test_client_library_keeps_an_idle_connection_alive",
        "balanced::test_chain_cancel_and_follow_cross_two_servers",
    ),
    "F4 pings of an idle or busy socket go unanswered": (
        "connections::test_ping_is_answered_while_a_response_streams",
        "listener/socket::test_ping_is_answered_ahead_of_a_full_outbox",
    ),
    "F5 half-dead sockets are used again": (
        "listener/socket::test_silent_peer_is_lost_after_its_pongs_are_missed",
        "listener/socket::test_end_of_stream_is_a_loss",
        "listener/socket::test_reset_is_a_loss",
        "listener/socket::test_our_close_sends_what_is_queued_and_waits_for_the_peer",
        "listener/socket::test_peer_that_never_answers_our_close_is_lost",
        "hazards::test_line_of_a_dead_peer_is_given_up_by_the_system_too",
    ),
    "F6 a frame that is never answered": (
        "hazards::test_every_frame_is_answered_within_a_second_while_a_response_runs",
        "hazards::test_mistake_of_ours_in_reading_a_frame_is_told_and_the_socket_lives",
        "connections::test_mistake_of_ours_is_reported_and_does_not_block_the_lane",
        "bad_input::test_socket_client_is_told_what_is_wrong",
        "protocol_endpoints::test_frames_that_are_no_create_are_told_so_and_the_socket_stays",
        "listener/protocol::test_offer_of_another_protocol_is_passed_over",
    ),
    "F7 healthy sockets closed by a busy event loop": (
        "listener/socket::test_uploading_peer_is_not_lost_without_pongs",
        LIMITS,
        "vocabularies/vocabulary::test_long_text_is_encoded_while_other_threads_run",
        "documents/pdf_worker::test_others_are_served_while_a_small_file_takes_its_time",
        "process/runner::test_large_input_is_validated_in_slices",
        "stores/sqlite::test_loop_and_readers_go_on_while_a_commit_takes_its_time",
    ),
    "F8 HTTP answers 200 and then nothing": (
        SILENCE,
        "transports::test_refusal_says_the_same_on_every_transport",
        "protocol_endpoints::test_sse_events_are_framed_and_end_with_done",
    ),
    # A connection closed on a message tells each create by `error`, since a stored turn goes on and does not fail.
    "F9 closed before the terminal event": (
        ANSWERED,
        "shutdown::test_turns_that_outlast_the_grace_end_as_failed",
        "keys::test_revoked_key_finishes_its_turn_and_then_loses_its_socket",
        "protocol_section_10::test_section_10_row_12_a_turn_is_closed_upon_with_1009_or_1012_only",
    ),
    "F10 the age limit kills a turn, for all at once": (
        "connections::test_old_connection_finishes_its_turn_and_takes_no_new_one",
        "connections::test_old_idle_connection_gets_an_error_and_is_closed",
        "hazards::test_connections_of_one_hour_do_not_all_end_together",
    ),
    "F11 large messages end the session without a word": (
        "bad_input::test_oversize_frame_is_named_and_ends_the_connection",
        "bad_input::test_oversize_body_is_named_with_both_figures",
        "listener/socket::test_client_in_the_middle_of_a_large_upload_reads_why_it_is_refused",
        "canaries::test_limits_are_among_the_metrics",
        LIMITS,
    ),
    "F12 a drop in the middle loses the step": (
        REPLAYED,
        "connections::test_stored_turn_outlives_a_lost_connection_and_can_be_fetched",
        "reliability/lost_clients::test_stored_responses_are_finished_and_replayed_without_gap_or_repeat",
    ),
    "F13 no agreement on which event is the last": (
        "turn/assemble::test_events_of_any_turn_keep_the_rules",
        "turn/assemble::test_every_call_is_legal_in_one_state_only",
        "events::test_checker_sees_every_broken_rule",
        "transports::test_client_is_told_the_same_story_on_every_transport",
    ),
    "F14 the upgrade succeeds and then a close without a reason": (
        KEYLESS,
        ANSWERED,
        "connections::test_upgrade_is_refused_where_websocket_is_off",
        "listener/socket::test_refused_upgrade_is_plain_http_with_json",
    ),
    "F15 a stop breaks connections, or never ends": (
        "shutdown::test_running_turns_finish_and_new_work_is_refused",
        "shutdown::test_turns_that_outlast_the_grace_end_as_failed",
        "shutdown::test_idle_server_stops_at_once_and_tells_its_sockets",
        "workers::test_stop_truncates_none_of_two_hundred_responses",
        "reliability/drain::test_ten_restarts_truncate_none_of_a_thousand_responses_each",
    ),
    "F16 a full queue cuts the client, pongs included": (
        UNREAD,
        "connections::test_sse_reader_that_never_reads_slows_the_model_and_is_cut",
        "listener/socket::test_full_outbox_resumes_when_the_peer_reads",
        "listener/socket::test_slow_reader_is_not_cut_while_it_reads",
        "listener/socket::test_ping_is_answered_ahead_of_a_full_outbox",
    ),
    "F17 our own fault looks like the engine's": (
        "hazards::test_faults_of_caller_engine_and_server_have_three_statuses",
        "engines/upstream::test_refusal_becomes_our_own_error",
        "replicas/router::test_clients_error_is_not_the_replicas",
    ),
    "F18 a refused upgrade costs minutes of retries": (
        "connections::test_upgrade_is_refused_where_websocket_is_off",
        STORIES,
    ),
    "F19 the upgrade wants a query, or is not routed": (
        "connections::test_upgrade_takes_a_query_and_a_trailing_slash",
        "paths::test_client_creates_continues_and_fetches_by_any_path",
        "protocol_endpoints::test_upgrade_takes_the_headers_of_real_clients",
    ),
    "F20 warm-ups are refused": (
        "connections::test_warm_up_says_nothing_and_can_be_continued",
        "connections::test_warm_up_needs_no_input",
        "openai_python::test_python_client_warms_up_and_then_sends_nothing_new",
    ),
    "F21 hidden caps and long queues for sub-agents": (
        "keys::test_connections_of_a_key_are_counted",
        "keys::test_turns_at_once_of_a_key_are_counted",
        "engines/fair_queue::test_owner_with_one_job_does_not_wait_for_anothers_hundred",
        "engines/fair_queue::test_places_go_round_between_lanes_within_an_owners_share",
        "clients/codex::test_codex_runs_sub_agents_on_sockets_of_their_own",
    ),
    # A second create of a lane waits for the first (docs/protocol.md 6.2); only a conversation refuses an overlap.
    "F22 a real overlap, or a false one behind the end": (
        "hazards::test_next_create_may_follow_a_terminal_event_at_once",
        "connections::test_creates_of_one_lane_run_one_after_the_other_in_order",
        "conversations::test_one_response_at_a_time_speaks_in_a_conversation",
    ),
    "F23 a tool result joins an older branch": (
        "protocol_endpoints::test_lane_never_implies_a_lineage",
        "connections::test_client_forks_from_the_default_lane_and_back",
        "connections::test_waiting_fork_keeps_its_parent_while_the_source_moves_on",
    ),
    "F24 errors of a shape that clients do not know": (
        "wire/events::test_error_event_is_nested_with_status_code_and_number",
        "openai_python::test_python_client_catches_the_error_it_knows",
        "openai_node::test_node_client_goes_on_after_an_error_on_the_same_socket",
    ),
    "F25 the same error has two names": (
        "transports::test_refusal_says_the_same_on_every_transport",
        "bad_input::test_http_client_is_told_what_is_wrong",
        "bad_input::test_socket_client_is_told_what_is_wrong",
    ),
    "F26 what was not to be stored is on the disk": (
        CANARIES,
        "canaries::test_a_trace_would_be_found",
        "storage::test_unstored_content_touches_no_disk_and_no_log",
        "connections::test_unstored_parent_lives_and_dies_with_its_socket",
        "reliability/canaries::test_two_thousand_unstored_turns_leave_no_trace",
    ),
    "F27 what is not stored is forgotten on its own socket": (
        "connections::test_unstored_parent_lives_and_dies_with_its_socket",
        "process/runner::test_unstored_turn_touches_no_disk",
    ),
    "F28 chaining drops calls and outputs": (
        "chained_equals_full::test_engine_sees_the_conversation_that_the_specification_says",
        "contracts/dialects::test_warmth_changes_no_token",
    ),
    "F29 calls of other types are lost, and then their outputs": (
        "protocol_items::test_call_and_its_output_are_taken_back",
        "contracts/turns::test_item_of_each_type_comes_back_to_the_byte",
        "turn/resolve::test_pairing_agrees_with_a_list_of_debts",
        "connections::test_failed_continuation_evicts_its_parent",
    ),
    "F30 a store in memory without bounds": (
        "stores/budget::test_whatever_happens_all_limits_hold_and_the_modest_lose_nothing",
        "stores/memory_turns::test_any_history_keeps_the_books_right",
        "keys::test_state_of_a_key_is_bounded_over_its_connections",
        "canaries::test_limits_are_among_the_metrics",
    ),
    # A thought that cannot be opened is left out and the turn goes on; a compaction is a history, and is refused.
    "F31 old threads die with a key of the seals": (
        "seals/ring::test_ring_survives_a_restart_and_a_rotation",
        "/cli::test_rotated_ring_seals_anew_and_opens_the_old",
        "compaction::test_reasoning_comes_back_sealed_and_is_read_again",
        "compaction::test_foreign_compaction_is_refused",
    ),
    "F32 a retry runs the turn twice": (
        "background::test_model_runs_once_for_one_key",
        "background::test_key_of_a_stored_response_survives_a_restart",
        "across_workers::test_repeat_elsewhere_hears_the_turn_and_starts_none",
        "fencing::test_repeat_after_a_crash_waits_for_the_lease_and_runs",
        "stores/leases::test_key_that_was_given_away_is_not_used_twice",
    ),
    "F33 the client is gone and tokens burn, or are not counted": (
        LEFT,
        UNREAD,
        "connections::test_dropped_sse_request_cancels_its_turn",
        "connections::test_dropped_plain_request_cancels_its_turn",
        "listener/protocol::test_turn_ends_when_a_client_leaves_that_has_asked_for_more",
        "background::test_unstored_response_of_a_lost_socket_stops_costing_the_engine",
        "reliability/lost_clients::test_unstored_responses_stop_within_a_second",
    ),
    "F34 odd characters poison the store": (
        "contracts/turns::test_nasty_text_comes_back_to_the_byte",
        "contracts/conversations::test_odd_names_are_absent_and_harmless",
        "contracts/maintenance::test_row_that_cannot_be_read_keeps_nobody_waiting",
        "bad_input::test_nul_in_text_comes_back_as_it_went",
        "stores/postgres::test_damaged_row_is_our_fault_and_harms_only_itself",
    ),
    "F35 a cancelled request leaves its answer to the next": (
        STORM,
        "stores/postgres::test_cancelled_request_leaves_no_connection_half_read",
        "contracts/turns::test_many_owners_at_once_never_see_one_another",
    ),
    "F36 limits told without status and time": (
        "wire/events::test_error_for_load_says_when_to_come_back",
        "keys::test_requests_a_minute_are_counted_for_all_transports_together",
        "shutdown::test_running_turns_finish_and_new_work_is_refused",
    ),
    "F37 other keys read, cancel and continue": MATRIX,
    "F38 sockets outlive their key": (
        *REVOKED,
        "accounts/account::test_revoked_key_is_gone_after_the_next_confirmation",
        "contracts/keys::test_other_processes_see_keys_come_and_go",
    ),
    "F39 deep JSON ends the process": (
        "bad_input::test_http_client_is_told_what_is_wrong",
        "bad_input::test_socket_client_is_told_what_is_wrong",
        "wire/codec::test_huge_number_is_answered_and_not_crashed_on",
        "wire/codec::test_any_bytes_are_a_request_or_a_refusal",
    ),
    "F40 memory grows with connections that come and go": (
        "memory/heap::test_what_lies_free_between_blocks_in_use_goes_back",
        "hazards::test_all_is_as_before_once_everybody_has_left",
        "turn/running::test_turn_that_is_over_keeps_none_of_its_hearers",
        "stores/budget::test_closed_connection_counts_no_longer",
    ),
}

THREATS: dict[str, Tests] = {
    "T1 somebody else's ids": (
        "isolation::test_every_route_is_in_the_matrix",
        *MATRIX,
        "isolation::test_running_response_of_another_owner_is_absent",
        "isolation::test_idempotency_keys_of_two_owners_do_not_meet",
        "across_workers::test_foreign_and_absent_responses_look_the_same_from_everywhere",
        "contracts/turns::test_stranger_and_nobody_get_the_same_answer",
        "hazards::test_ids_cannot_be_guessed",
    ),
    # Keys are found by their keyed hash: there is no secret to compare with, and so no time to measure.
    "T2 around or through the check of keys": (
        KEYLESS,
        "commands/keys::test_key_is_printed_once_and_stored_nowhere",
        "accounts/account::test_made_up_secrets_never_reach_the_store",
        "listener/auth::test_any_header_is_read_without_complaint",
        "contracts/turns::test_odd_names_are_absent_and_harmless",
        "rules/queries::test_no_query_is_put_together_from_parts",
        "isolation::test_every_route_is_in_the_matrix",
    ),
    "T3 paths that are read in two ways": (
        "hazards::test_no_spelling_of_a_path_or_host_leads_around_the_key",
        "isolation::test_matrix_over_http",
        "keys::test_key_opens_only_what_its_scopes_say",
        "paths::test_other_paths_are_unknown",
    ),
    "T4 pages of others in a victim's browser": (
        "listener/auth::test_strange_names_and_pages_are_refused_on_every_transport",
        "listener/auth::test_other_names_are_not_while_nobody_needs_a_key",
        "hazards::test_key_is_read_from_its_header_alone",
        "keys::test_public_address_needs_keys",
        LIMITS,
    ),
    "T5 secrets in addresses and logs": (
        CANARIES,
        "hazards::test_key_is_read_from_its_header_alone",
        "keys::test_key_in_the_address_is_no_key",
        "canaries::test_unexpected_faults_are_logged_without_key_and_content",
        "observe/logs::test_no_key_gets_through_a_log_line",
        "/cli::test_unreachable_store_is_said_without_its_password",
        "exports/audit::test_every_turn_and_every_refusal_is_one_line_without_content",
    ),
    "T6 a key that is taken back while its socket is open": REVOKED,
    # Pictures are never unpacked here, and no request fans out: there is no `n`.
    "T7 memory": (
        "listener/socket::test_client_that_offers_compression_gets_none",
        "listener/protocol::test_endless_head_is_refused",
        "listener/protocol::test_endless_bytes_that_are_no_body_are_refused",
        "listener/inflate::test_bomb_is_refused",
        "listener/protocol::test_flood_of_frames_ends_the_connection_and_no_other",
        "listener/socket::test_flood_of_pings_from_a_peer_that_does_not_read_takes_no_memory",
        "listener/socket::test_upgrade_may_be_decided_later",
        "documents/pdf_worker::test_page_that_unfolds_to_megabytes_is_told_and_not_read",
        "files/depot::test_uploads_that_stall_hold_little_memory_which_is_counted",
        "memory_limit::test_server_holds_no_more_than_its_limit",
        "wire/tools::test_more_tools_than_anybody_has_are_refused",
        "bad_input::test_http_client_is_told_what_is_wrong",
    ),
    # Schemas and grammars are compiled by the engine; an operator's own patterns are the operator's (docs/guards.md).
    "T8 processor time": (
        "listener/protocol::test_flood_of_frames_ends_the_connection_and_no_other",
        "vocabularies/vocabulary::test_long_text_is_encoded_while_other_threads_run",
        "documents/pdf_worker::test_form_that_is_drawn_without_end_is_read_up_to_a_limit",
        "documents/pdf_worker::test_others_are_served_while_a_small_file_takes_its_time",
        "completions/messages::test_arguments_that_are_too_much_for_an_item_stay_as_they_are",
        "dialects/template::test_arguments_that_are_too_deep_or_too_many_are_shown_as_a_text",
        "growth/growth::test_structure_costs_what_its_size_costs",
        "schemas/example::test_hopeless_schema_still_gives_something_small",
        "web/html::test_odd_html_takes_no_time",
    ),
    # There is no limit on the time to a socket's first message: an idle one costs little, and agents keep them ready.
    "T9 slow peers": (
        "listener/protocol::test_head_that_does_not_come_is_not_waited_for",
        "listener/protocol::test_head_of_a_second_request_is_not_waited_for_either",
        "listener/protocol::test_empty_lines_between_requests_do_not_keep_a_connection",
        "listener/protocol::test_rest_of_a_request_that_is_answered_is_not_waited_for",
        "listener/protocol::test_body_that_trickles_is_not_waited_for",
        "listener/protocol::test_client_that_asks_and_does_not_read_is_cut",
        "listener/socket::test_message_that_is_never_whole_is_not_waited_for",
        "listener/socket::test_peer_that_never_reads_is_cut_and_logged",
        UNREAD,
        LIMITS,
    ),
    "T10 addresses that lead inside": (
        "web/fetch::test_no_vector_reaches_anything",
        "web/fetch::test_no_redirect_leads_inside",
        "web/fetch::test_name_that_changes_its_mind_is_believed_once",
        "web/fetch::test_credentials_stay_with_the_first_origin",
        "web/fetch::test_fetcher_is_off_until_it_is_switched_on",
        "tools/inputs::test_client_is_refused_an_address_inside_on_every_transport",
        "mcp::test_server_that_may_not_be_called_is_refused",
        "mcp::test_keys_of_the_operator_go_to_the_operators_server_only",
    ),
    "T11 words that would be commands": (
        "contracts/dialects::test_text_never_becomes_special",
        "mcp::test_output_of_a_tool_is_data_and_never_a_mark",
        "mcp/definitions::test_person_is_asked_unless_the_request_says_otherwise",
        "mcp::test_limit_of_the_request_holds_over_all_rounds",
        "mcp::test_model_that_calls_in_circles_comes_to_an_end",
        "guards::test_tool_of_the_server_waits_for_the_verdict",
    ),
    # Sealed for the owner alone: clients send items back in any response, so neither response nor item is bound.
    "T12 misuse of what is sealed": (
        "seals/cipher::test_nobody_else_opens_it",
        "seals/cipher::test_changed_seal_is_no_seal",
        "seals/cipher::test_any_text_is_answered",
        "compaction::test_foreign_compaction_is_refused",
        "isolation::test_matrix_over_http",
    ),
    "T13 two requests mixed up in one process": (
        STORM,
        "contracts/turns::test_many_owners_at_once_never_see_one_another",
        "listener/protocol::test_trailer_is_no_header",
    ),
    "T14 data that is kept against the promise": (
        CANARIES,
        "stores/sqlite::test_deleted_bytes_are_in_no_file",
        "stores/sqlite::test_swept_bytes_are_in_no_file",
        "storage::test_deleted_turn_is_erased_and_its_descendants_end_there",
        "odd_times::test_words_that_are_not_stored_do_not_reach_the_disk_by_a_compaction",
    ),
    "T15 everybody comes back at once": (
        "keys::test_process_has_a_limit_of_connections",
        "listener/protocol::test_one_connection_too_many_is_refused_in_a_few_bytes",
        "hazards::test_connections_of_one_hour_do_not_all_end_together",
    ),
    "T16 requests smuggled past the parser": (
        "listener/protocol::test_request_whose_end_is_in_doubt_is_refused_with_all_after_it",
        "listener/protocol::test_trailer_is_no_header",
        "listener/socket::test_violation_is_closed_with_its_code",
        "rules/floors::test_no_lock_file_holds_a_version_with_a_known_hole",
        "balanced::test_chain_cancel_and_follow_cross_two_servers",
    ),
    "T17 a dependency that turns": (
        "rules/floors::test_every_locked_package_has_a_hash_and_no_address",
        "rules/floors::test_lock_files_satisfy_the_project_files",
        "rules/floors::test_environment_runs_no_code_of_others_at_its_start",
        "rules/floors::test_no_lock_file_holds_a_version_with_a_known_hole",
    ),
}
