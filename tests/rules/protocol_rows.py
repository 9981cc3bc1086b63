"""Every row of the wire contract (docs/protocol.md 1 to 6, 8.2 and 10) and the tests that prove it.

A row is named in a few words, in the order of the contract. Tests are named as `file::test`: a bare file stands in
tests/scenarios, others are named with their room, both without `test_` and `.py`. A row that we
leave out on purpose says why.
"""

from __future__ import annotations

from typing import NamedTuple


class NotServed(NamedTuple):
    """The row is optional, and we leave it out on purpose."""

    reason: str


Tests = tuple[str, ...]
Proof = Tests | NotServed

UNRUN = NotServed("nobody here runs this tool: it is taken and echoed")
NO_KEY = "keys::test_request_without_a_key_with_a_wrong_one_or_a_revoked_one_is_refused"
SEARCH = "web_search::test_events_come_in_the_order_of_the_contract"

# What every turn of every story is held against.
STORIES = "transports::test_client_is_told_the_same_story_on_every_transport"
ECHO = "protocol_fields::test_field_is_taken_and_echoed"
IGNORED = "rules/fields_documented::test_ignored_fields_change_nothing_but_their_echo"
ITEMS = "protocol_items::test_item_of_each_type_is_taken_and_listed"
PAIRS = "protocol_items::test_call_and_its_output_are_taken_back"
LISTED = "protocol_items::test_tool_of_each_type_may_be_listed"
FORCED = "protocol_items::test_hosted_tool_that_is_forced_is_refused"
MCP = "mcp::test_call_and_its_answer_are_told_in_the_order_of_the_contract"
CHECKED = "events::test_checker_sees_every_broken_rule"
KNOWN = "wire/events::test_event_has_the_fields_of_the_contract"
SHAPES = "protocol_shapes::test_everything_that_we_send_is_what_the_newest_client_expects"
OPEN = "protocol_shapes::test_everything_that_we_send_obeys_open_responses"

ROWS: dict[str, dict[str, Proof]] = {
    "1 endpoints": {
        "POST /v1/responses": (
            "protocol_endpoints::test_client_creates_retrieves_lists_and_deletes_a_response",
            STORIES,
        ),
        "GET /v1/responses/{id}": (
            "protocol_endpoints::test_client_creates_retrieves_lists_and_deletes_a_response",
            "openai_python::test_python_client_retrieves_what_it_created",
        ),
        "GET /v1/responses/{id}, stream and starting_after": (
            "background::test_client_comes_back_for_a_background_response",
            "background::test_stored_response_of_a_lost_socket_is_replayed_without_gap_or_repeat",
        ),
        "DELETE /v1/responses/{id}": (
            "protocol_endpoints::test_client_creates_retrieves_lists_and_deletes_a_response",
            "storage::test_deleted_turn_is_erased_and_its_descendants_end_there",
        ),
        "POST /v1/responses/{id}/cancel": (
            "background::test_client_cancels_a_background_response",
            "background::test_only_background_responses_are_cancelled_by_name",
        ),
        "GET /v1/responses/{id}/input_items": (
            "storage::test_client_pages_through_input_items",
            "openai_python::test_python_client_pages_through_input_items_in_both_orders",
        ),
        "POST /v1/responses/compact": (
            "compaction::test_window_of_the_endpoint_begins_a_new_chain",
        ),
        "POST /v1/responses/input_tokens": (
            "protocol_endpoints::test_tokens_of_a_prompt_are_counted_without_generating",
            "background::test_input_tokens_are_those_of_the_response",
        ),
        "GET /v1/models, GET /v1/models/{id}": (
            "protocol_endpoints::test_models_are_listed_and_found_by_name",
            "openai_python::test_python_client_lists_and_retrieves_models",
        ),
        "POST /v1/conversations": ("conversations::test_responses_read_and_add_to_a_conversation",),
        "GET/POST/DELETE /v1/conversations/{id}": (
            "conversations::test_metadata_is_changed_and_the_conversation_erased",
        ),
        "GET/POST /v1/conversations/{id}/items": (
            "conversations::test_items_are_added_listed_and_erased",
        ),
        "GET/DELETE /v1/conversations/{id}/items/{item_id}": (
            "conversations::test_items_are_added_listed_and_erased",
            "conversations::test_erased_item_is_not_shown_to_the_model_again",
        ),
        "GET /v1/responses with an upgrade": (
            "walk::test_client_walks_a_tool_loop_over_websocket",
            "openai_python::test_python_client_runs_a_loop_of_thirty_turns",
            "openai_node::test_node_client_runs_a_loop_of_thirty_turns_on_one_socket",
        ),
        "?beta=true twins": NotServed("the multi-agent beta is optional"),
        "list object": (
            "wire/codec::test_list_object_names_its_first_and_last",
            "storage::test_client_pages_through_input_items",
        ),
    },
    "1.1 HTTP errors": {
        "body with four keys": (
            "wire/events::test_error_body_has_its_four_keys",
            "protocol_shapes::test_error_bodies_have_their_four_keys",
        ),
        "status map of the SDKs": ("openai_python::test_python_client_catches_the_error_it_knows",),
        "400 previous_response_not_found": (
            "protocol_endpoints::test_errors_before_a_turn_have_the_codes_of_the_contract",
        ),
        "400 context_length_exceeded": (
            "bad_input::test_context_overflow_fails_the_response_and_is_a_status_for_plain_json",
        ),
        "400 tool output without its call, or a call without its output": (
            "protocol_endpoints::test_errors_before_a_turn_have_the_codes_of_the_contract",
            PAIRS,
        ),
        "401 invalid_api_key": (NO_KEY,),
        "403 policy": NotServed("a policy of OpenAI's"),
        "404 model_not_found": (
            "protocol_endpoints::test_errors_before_a_turn_have_the_codes_of_the_contract",
        ),
        "429 rate_limit_exceeded": (
            "bad_input::test_socket_client_may_let_64_creates_wait_and_no_more",
        ),
        "429 insufficient_quota": (
            "keys::test_requests_a_minute_are_counted_for_all_transports_together",
        ),
        "503 server_is_overloaded": (
            "shutdown::test_running_turns_finish_and_new_work_is_refused",
        ),
    },
    "1.2 compact": {
        "model is required": ("compaction::test_compact_needs_a_model",),
        "unknown keys are ignored": ("open_responses::test_open_responses_compact_response",),
        "retained messages, then one compaction item": (
            "compaction::test_window_of_the_endpoint_begins_a_new_chain",
        ),
        "the window is accepted back": (
            "protocol_section_10::test_section_10_row_15_a_compacted_window_is_taken_back_verbatim",
        ),
    },
    "1.3 SSE framing": {
        "event name equals type": (
            "protocol_endpoints::test_sse_events_are_framed_and_end_with_done",
        ),
        "[DONE] at the end of SSE, never on a socket": (
            "protocol_endpoints::test_sse_events_are_framed_and_end_with_done",
            "protocol_section_10::test_section_10_row_6_a_socket_carries_json_objects_and_nothing_else",
        ),
        "no truthy top-level error on SSE": (
            "protocol_endpoints::test_sse_events_are_framed_and_end_with_done",
        ),
    },
    "2 request": {
        "type": (
            "protocol_endpoints::test_frames_that_are_no_create_are_told_so_and_the_socket_stays",
        ),
        "model": (
            ECHO,
            "protocol_fields::test_request_without_model_or_input_is_told_what_is_missing",
            "protocol_fields::test_settings_are_not_inherited_from_the_parent_but_the_model_is",
        ),
        "input": (
            ECHO,
            "protocol_fields::test_request_without_model_or_input_is_told_what_is_missing",
            "protocol_section_10::test_section_10_row_3_empty_input_with_a_parent_generates",
        ),
        "instructions": (
            ECHO,
            "protocol_fields::test_settings_are_not_inherited_from_the_parent_but_the_model_is",
        ),
        "previous_response_id": (
            ECHO,
            "transports::test_client_carries_one_chain_over_all_transports",
        ),
        "conversation": (
            "conversations::test_responses_read_and_add_to_a_conversation",
            "conversations::test_conversation_is_spoken_on_the_socket_too",
            "conversations::test_what_a_conversation_cannot_do_is_refused",
        ),
        "store": (
            ECHO,
            "storage::test_unstored_content_touches_no_disk_and_no_log",
            "protocol_section_10::test_section_10_row_14_store_left_out_means_true_on_the_socket_too",
        ),
        "generate": (ECHO, "connections::test_warm_up_says_nothing_and_can_be_continued"),
        "stream_id": (
            "protocol_fields::test_stream_id_is_refused_on_http",
            "bad_input::test_legal_lane_names_are_echoed_on_every_event",
        ),
        "stream": (
            STORIES,
            "protocol_section_10::test_section_10_row_2_words_of_other_transports_are_ignored_on_the_socket",
        ),
        "stream_options": (
            ECHO,
            IGNORED,
            "protocol_section_10::test_section_10_row_2_words_of_other_transports_are_ignored_on_the_socket",
        ),
        "background": (
            "background::test_client_comes_back_for_a_background_response",
            "background::test_background_belongs_to_http_and_to_stored_responses",
        ),
        "tools": (ECHO, LISTED),
        "tool_choice": (
            ECHO,
            "protocol_fields::test_forced_tool_is_called_and_a_forbidden_one_is_not",
        ),
        "parallel_tool_calls": (ECHO, IGNORED),
        "max_tool_calls": (ECHO, "mcp::test_limit_of_the_request_holds_over_all_rounds"),
        "max_output_tokens": (
            ECHO,
            "protocol_fields::test_answer_that_hits_its_limit_is_incomplete",
        ),
        "temperature, top_p": (
            ECHO,
            "turn/admit::test_where_a_client_says_nothing_the_models_usual_sampling_holds",
        ),
        "presence_penalty, frequency_penalty": (ECHO,),
        "top_logprobs": (ECHO, IGNORED),
        "text": (ECHO, "openai_python::test_python_client_parses_an_answer_in_its_own_shape"),
        "reasoning": (ECHO,),
        "include": (ECHO, IGNORED),
        "truncation": (
            ECHO,
            "turn/truncate::test_client_that_allows_truncation_is_answered_from_the_newest_items",
        ),
        "context_management": ("compaction::test_threshold_compacts_inside_a_response",),
        "prompt": ("protocol_fields::test_prompt_templates_are_refused_by_name",),
        "prompt_cache_key": (ECHO,),
        "prompt_cache_options": (ECHO, STORIES),
        "prompt_cache_retention": (ECHO, IGNORED),
        "service_tier": (ECHO, "turn/admit::test_tier_is_the_one_that_the_key_allows"),
        "metadata": (ECHO, "wire/codec::test_field_takes_what_the_contract_allows"),
        "safety_identifier": (ECHO, IGNORED),
        "user": (ECHO, IGNORED),
        "moderation": (ECHO, IGNORED),
        "image": (ECHO, IGNORED),
        "access_programs": (ECHO, IGNORED),
        "client_metadata": (ECHO, IGNORED),
        "multi_agent": (ECHO, IGNORED),
        "unknown keys are ignored, known ones are type-checked": (
            ECHO,
            "bad_input::test_http_client_is_told_what_is_wrong",
            "bad_input::test_socket_client_is_told_what_is_wrong",
        ),
    },
    "2.1 response object": {
        "every field on every snapshot": (CHECKED, STORIES, OPEN),
        "numbers are never null": (
            "protocol_section_10::test_section_10_row_8_null_is_never_said_for_a_number_or_an_absent_key",
            OPEN,
        ),
        "status completed": (STORIES,),
        "status incomplete": (STORIES,),
        "status failed": (STORIES,),
        "status in_progress": (STORIES,),
        "status queued": ("background::test_client_comes_back_for_a_background_response",),
        "status cancelled": (
            "connections::test_close_frame_cancels_a_stored_turn_and_keeps_its_finished_items",
        ),
        "incomplete_details max_output_tokens": (
            "protocol_fields::test_answer_that_hits_its_limit_is_incomplete",
        ),
        "incomplete_details content_filter": (
            "guards::test_blocked_answer_ends_incomplete_with_what_has_passed",
        ),
        "incomplete_details steered": (
            "steering::test_client_steers_a_long_answer_and_the_successor_follows",
        ),
        "usage with its details": (SHAPES, "process/runner::test_plain_turn_counts_what_it_used"),
        "error codes of a failed response": ("turn/assemble::test_failed_response_says_why",),
        "tools echo with nullable keys": (
            "wire/tools::test_response_echoes_a_function_with_all_its_nullable_keys",
        ),
        "id prefixes": (CHECKED, STORIES),
    },
    "3.1 messages": {
        "easy form": ("protocol_items::test_easy_forms_mean_the_same",),
        "roles": ("protocol_items::test_every_role_is_taken",),
        "input parts": (
            ITEMS,
            "protocol_items::test_picture_and_file_are_taken_by_a_model_without_eyes",
            "protocol_items::test_files_that_were_not_uploaded_are_refused_in_words",
        ),
        "assistant history parts": (ITEMS,),
        "phase": ("protocol_items::test_phase_of_an_assistants_message_is_kept",),
        "annotations, logprobs": (ITEMS, "wire/items::test_item_of_each_type_is_kept_to_the_byte"),
    },
    "3.2 function calls": {
        "call": (STORIES, PAIRS),
        "output as a string or parts": (PAIRS,),
        "output without call_id": (
            PAIRS,
            "turn/resolve::test_output_that_names_no_call_means_the_only_one",
        ),
        "namespace, async": (
            "turn/assemble::test_call_carries_its_namespace_and_that_it_may_stay_open",
        ),
    },
    "3.3 custom calls": {
        "call": (STORIES,),
        "output": (PAIRS,),
    },
    "3.4 reasoning": {
        "summary always, content optional": (
            "transports::test_client_sees_what_each_story_is_about",
            "openai_python::test_strict_helper_accepts_reasoning_however_it_is_shown",
        ),
        "encrypted_content filled": (
            "compaction::test_reasoning_comes_back_sealed_and_is_read_again",
        ),
        "resent verbatim": (
            "protocol_section_10::test_section_10_row_15_done_items_and_reasoning_are_taken_back_verbatim",
        ),
        "absent rather than null on output": (OPEN,),
    },
    "3.5 built-in tool items": {
        "web_search_call": (ITEMS,),
        "file_search_call": (ITEMS,),
        "code_interpreter_call": (ITEMS,),
        "image_generation_call": (ITEMS,),
        "computer_call and its output": (PAIRS,),
        "mcp_list_tools": (ITEMS, MCP),
        "mcp_call": (ITEMS, MCP),
        "mcp_approval_request and its response": (
            PAIRS,
            "mcp::test_person_approves_a_call_and_it_is_made_in_the_next_turn",
        ),
        "shell_call and its output": (PAIRS,),
        "local_shell_call and its output": (PAIRS,),
        "apply_patch_call and its output": (PAIRS,),
        "tool_search_call and its output": (PAIRS,),
        "additional_tools is taken": (ITEMS,),
        "additional_tools makes tools available": (
            "tools::test_client_brings_its_tools_as_an_item",
        ),
        "configuration_update is taken": (ITEMS,),
        "configuration_update changes settings": (
            "tools::test_settings_of_an_item_hold_along_the_chain_until_the_next",
        ),
        "program and its output": (ITEMS,),
        "compaction": (
            "compaction::test_chains_compaction_that_is_resent_hides_what_is_before_it",
            "compaction::test_foreign_compaction_is_refused",
        ),
        "compaction_trigger": ("compaction::test_trigger_compacts_a_chain_which_goes_on",),
        "item_reference": (
            "protocol_items::test_reference_stands_for_an_item_of_the_history",
            "background::test_client_names_items_that_the_server_keeps",
        ),
        "multi_agent items": NotServed("the multi-agent beta is optional"),
        "items without a type": (
            "wire/items::test_untyped_item_is_a_message_by_its_role_and_a_reference_by_its_id",
            "protocol_items::test_easy_forms_mean_the_same",
        ),
    },
    "4.1 tools": {
        "function": (LISTED, STORIES),
        "custom": (LISTED, STORIES),
        "custom with a grammar": (
            "turn/admit::test_client_forces_a_grammar_on_an_engine_that_knows_only_json",
        ),
        "namespace": (LISTED, STORIES),
        "tool_search is listed": (LISTED,),
        "web_search and its aliases": (LISTED, FORCED),
        "mcp, its secrets never echoed": (
            LISTED,
            "wire/tools::test_secrets_of_a_remote_server_are_not_echoed",
            "mcp::test_server_of_a_request_is_called_where_its_host_is_allowed",
        ),
        "shell is listed": (LISTED,),
        "apply_patch is listed": (LISTED,),
        "local_shell is listed": (LISTED,),
        "computer": (LISTED, FORCED),
        "programmatic_tool_calling": (LISTED,),
        "file_search": (LISTED, FORCED),
        "code_interpreter": (LISTED, FORCED),
        "image_generation": (LISTED, FORCED),
        "shell, apply_patch and local_shell called by the model": (
            "tools::test_client_runs_a_tool_of_each_shape",
        ),
    },
    "4.2 namespaces, deferral, tool search": {
        "calls carry their namespace": (
            STORIES,
            "transports::test_client_sees_what_each_story_is_about",
        ),
        "defer_loading": (
            "tools::test_server_searches_and_the_model_goes_on_in_the_same_response",
        ),
        "server execution": (
            "tools::test_server_searches_and_the_model_goes_on_in_the_same_response",
        ),
        "client execution": ("tools::test_client_runs_a_tool_of_each_shape",),
        "no top-level tools": ("tools::test_client_brings_its_tools_as_an_item",),
    },
    "4.3 tool_choice": {
        "none, auto, required": (
            ECHO,
            "protocol_fields::test_forced_tool_is_called_and_a_forbidden_one_is_not",
        ),
        "function": (
            ECHO,
            "protocol_fields::test_forced_tool_is_called_and_a_forbidden_one_is_not",
        ),
        "custom": (ECHO,),
        "mcp": ("mcp::test_client_forces_a_call_of_a_server",),
        "hosted tools": (FORCED,),
        "apply_patch, shell": ("tools::test_client_forces_a_builtin",),
        "allowed_tools": (
            ECHO,
            "turn/resolve::test_allowed_tools_are_checked_before_anything_starts",
        ),
        "a choice that cannot be met is refused": (
            "turn/resolve::test_choice_that_cannot_be_met_is_refused_rather_than_missed",
        ),
    },
    "4.4 async tools": {
        "a pending async call is no fault": (
            "protocol_items::test_async_call_may_be_answered_in_any_later_request",
        ),
        "the emitted call carries async": (
            "turn/assemble::test_call_carries_its_namespace_and_that_it_may_stay_open",
        ),
    },
    "5.1 events": {
        "created, in_progress": (STORIES, KNOWN),
        "queued": (KNOWN, "background::test_client_comes_back_for_a_background_response"),
        "completed, failed, incomplete": (STORIES, KNOWN),
        "output_item.added, output_item.done": (STORIES, KNOWN),
        "content_part.added, content_part.done": (STORIES, KNOWN),
        "output_text.delta, output_text.done": (STORIES, KNOWN),
        "output_text.annotation.added": (KNOWN,),
        "refusal.delta, refusal.done": (KNOWN,),
        "function_call_arguments.delta, .done": (STORIES, KNOWN),
        "custom_tool_call_input.delta, .done": (STORIES, KNOWN),
        "reasoning_summary_part.added, .done": (STORIES, KNOWN),
        "reasoning_summary_text.delta, .done": (STORIES, KNOWN),
        "reasoning_text.delta, .done": (STORIES, KNOWN),
        "compaction.compacting": (KNOWN, "compaction::test_trigger_compacts_a_chain_which_goes_on"),
        "shell_call_command": (KNOWN, "tools::test_client_runs_a_tool_of_each_shape"),
        "shell_call_output_content": ("shell::test_events_come_as_recorded",),
        "web_search_call": (SEARCH,),
        "file_search_call": UNRUN,
        "code_interpreter_call, code_interpreter_call_code": (
            "recorded_events::test_stream_is_as_recorded",
        ),
        "image_generation_call": UNRUN,
        "mcp_list_tools, mcp_call, mcp_call_arguments": (KNOWN, MCP),
        "audio": NotServed("text models do not use it"),
        "error": ("wire/events::test_error_event_is_nested_with_status_code_and_number",),
        "steer": (KNOWN, "steering::test_client_steers_a_long_answer_and_the_successor_follows"),
        "inject": NotServed("the multi-agent beta is optional"),
        "nothing else": ("wire/events::test_every_event_of_the_contract_is_known", SHAPES),
    },
    "5.2 order": {
        "1 created, then in_progress": (CHECKED, STORIES),
        "2 in_progress once the parent is bound": (
            "protocol_section_10::test_section_10_row_4_in_progress_follows_created_once_the_parent_is_pinned",
        ),
        "3 item: added, inner events, done": (CHECKED, STORIES),
        "4 text: part added, deltas, done, part done": (CHECKED, STORIES),
        "5 function call: one delta at least": (CHECKED, STORIES),
        "6 reasoning": (CHECKED, STORIES),
        "7 output_index unique, items unchanged": (
            CHECKED,
            "openai_python::test_python_client_runs_a_loop_of_thirty_turns",
        ),
        "8 response id constant": (CHECKED, STORIES),
        "9 exactly one terminal event": (
            CHECKED,
            "protocol_endpoints::test_terminal_error_of_a_turn_is_told_once",
        ),
        "10 the snapshot repeats the output": (
            CHECKED,
            "protocol_section_10::test_section_10_row_5_done_items_and_the_terminal_snapshot_are_whole",
        ),
        "11 item_id equals item.id": (CHECKED, STORIES),
    },
    "5.3 sequence_number": {
        "0 and up, per response": (CHECKED, STORIES),
        "on error frames too": (
            "protocol_section_10::test_section_10_row_1_errors_are_nested_with_status_code_and_number",
        ),
    },
    "5.4 and 5.5 examples": {
        "(a) text": ("turn/assemble::test_text_answer_is_the_contracts_trace",),
        "(b) function call and continuation": (
            "turn/assemble::test_item_is_told_as_the_contracts_traces_tell_it",
            "walk::test_client_walks_a_tool_loop_over_websocket",
        ),
        "(c) reasoning": ("turn/assemble::test_item_is_told_as_the_contracts_traces_tell_it",),
        "(d) failure before a response": (
            "transports::test_refusal_says_the_same_on_every_transport",
        ),
        "(d) failure after created": (STORIES,),
        "(d) incomplete closes its open item": (
            "turn/assemble::test_cut_item_is_incomplete_and_last",
            STORIES,
        ),
        "no client cancel on the socket": (
            "protocol_section_10::test_section_10_row_11_closing_the_socket_is_the_only_cancel",
        ),
    },
    "6.1 handshake": {
        "same path as POST, query kept": (
            "connections::test_upgrade_takes_a_query_and_a_trailing_slash",
        ),
        "no subprotocol, with or without the beta header": (
            "protocol_endpoints::test_upgrade_takes_the_headers_of_real_clients",
        ),
        "bad auth is refused with 401": (NO_KEY,),
        "permessage-deflate may be offered": (
            "protocol_endpoints::test_upgrade_that_offers_compression_is_served",
        ),
        "426 where WebSocket is off": (
            "connections::test_upgrade_is_refused_where_websocket_is_off",
        ),
    },
    "6.2 lanes": {
        "one lane runs first in, first out": (
            "connections::test_creates_of_one_lane_run_one_after_the_other_in_order",
        ),
        "lanes run beside each other": ("connections::test_slow_lane_does_not_hold_up_a_fast_one",),
        "16 in flight, more wait": (
            "connections::test_sixteen_turns_run_at_once_and_the_seventeenth_waits",
        ),
        "32 names": ("bad_input::test_socket_client_may_name_32_lanes_and_no_more",),
        "a lane implies no lineage": ("protocol_endpoints::test_lane_never_implies_a_lineage",),
        "stream_id on every event, not on its own refusal": (
            "bad_input::test_legal_lane_names_are_echoed_on_every_event",
            "bad_input::test_socket_client_hears_of_a_bad_lane_without_its_name",
        ),
        "steer carries no stream_id": ("steering::test_bad_steer_fails_and_disturbs_nothing",),
    },
    "6.3 connection cache": {
        "latest of each lane, gone at the close": (
            "connections::test_unstored_parent_lives_and_dies_with_its_socket",
        ),
        "a stored parent is loaded": (
            "connections::test_stored_parent_outlives_eviction_and_the_socket",
        ),
        "settings are not inherited": (
            "protocol_fields::test_settings_are_not_inherited_from_the_parent_but_the_model_is",
        ),
    },
    "6.4 eviction": {
        "failed continuation on its lane evicts": (
            "connections::test_failed_continuation_evicts_its_parent",
        ),
        "failed fork does not": ("connections::test_failed_fork_evicts_nothing",),
        "response.failed counts": (
            "connections::test_turn_that_fails_after_it_started_evicts_its_parent_too",
        ),
        "incomplete does not": (
            "process/runner::test_answer_is_cut_at_the_limit_and_can_be_continued",
        ),
        "bad envelopes do not": ("connections::test_bad_envelopes_evict_nothing",),
    },
    "6.5 forks": {
        "fork from a finished response": (
            "connections::test_client_forks_from_the_default_lane_and_back",
            "openai_python::test_managed_session_forks_from_another_lane",
        ),
        "a waiting fork keeps its parent": (
            "connections::test_waiting_fork_keeps_its_parent_while_the_source_moves_on",
        ),
    },
    "6.6 lifetime": {
        "limit while idle": ("connections::test_old_idle_connection_gets_an_error_and_is_closed",),
        "limit in mid-turn": (
            "connections::test_old_connection_finishes_its_turn_and_takes_no_new_one",
        ),
        "large frames": ("bad_input::test_oversize_frame_is_named_and_ends_the_connection",),
    },
    "6.7 warm-up": {
        "no output, an id to continue from": (
            "connections::test_warm_up_says_nothing_and_can_be_continued",
        ),
        "prewarm forces it": (STORIES,),
        "empty input continues from it": (
            "protocol_section_10::test_section_10_row_3_empty_input_with_a_parent_generates",
        ),
        "needs no input": ("connections::test_warm_up_needs_no_input",),
    },
    "6.8 error frames": {
        "nested, with status": (
            "protocol_section_10::test_section_10_row_1_errors_are_nested_with_status_code_and_number",
        ),
        "previous_response_not_found": (
            "protocol_endpoints::test_errors_before_a_turn_have_the_codes_of_the_contract",
        ),
        "invalid_stream_id": (
            "bad_input::test_socket_client_hears_of_a_bad_lane_without_its_name",
        ),
        "websocket_stream_limit_reached": (
            "session/lanes::test_thirty_third_name_is_refused_in_the_contracts_words",
        ),
        "websocket_connection_limit_reached": (
            "connections::test_old_idle_connection_gets_an_error_and_is_closed",
        ),
        "bad JSON, unknown type": (
            "protocol_endpoints::test_frames_that_are_no_create_are_told_so_and_the_socket_stays",
        ),
        "binary frame": ("bad_input::test_binary_frame_is_named_and_ends_the_connection",),
        "errors close nothing and disturb no lane": (
            "bad_input::test_bad_frames_do_not_disturb_another_lane",
        ),
    },
    "6.9 close codes": {
        "1001 after the age limit": (
            "connections::test_old_idle_connection_gets_an_error_and_is_closed",
        ),
        "1009 for oversize, 1012 at a stop, never 1000 or 1001 in mid-turn": (
            "protocol_section_10::test_section_10_row_12_a_turn_is_closed_upon_with_1009_or_1012_only",
        ),
        "1007 for text that is not UTF-8": (
            "bad_input::test_frame_that_is_not_utf8_ends_the_connection",
        ),
        "pings: an uploading client is not late": (
            "listener/socket::test_uploading_peer_is_not_lost_without_pongs",
        ),
    },
    "6.10 steering": {
        "accepted": ("steering::test_client_steers_a_long_answer_and_the_successor_follows",),
        "failed, with the input returned": ("steering::test_bad_steer_fails_and_disturbs_nothing",),
        "safe boundary, incomplete with reason steered": (
            "steering::test_client_steers_a_long_answer_and_the_successor_follows",
        ),
        "automatic successor with inherited settings": (
            "steering::test_client_steers_a_long_answer_and_the_successor_follows",
            "steering::test_successor_goes_before_a_create_of_another_chain",
        ),
        "pending with stubs": (
            "steering::test_steer_waits_for_what_the_client_owes_and_goes_first_into_its_next_create",
        ),
        "queued steers prepended to a matching create": (
            "steering::test_steer_waits_for_what_the_client_owes_and_goes_first_into_its_next_create",
            "steering::test_create_that_waits_already_takes_the_steer_along",
        ),
        "error codes": (
            "steering::test_bad_steer_fails_and_disturbs_nothing",
            "steering::test_steer_needs_a_running_response_of_this_connection",
            "steering::test_too_many_steers_are_refused_and_the_rest_is_applied",
            "steering::test_warm_up_and_rollout_cannot_be_steered",
        ),
        "queued steers die with the connection": (
            "steering::test_steers_that_wait_die_with_the_connection",
        ),
    },
    "6.11 framing": {
        "text frames, one object each": (
            "protocol_section_10::test_section_10_row_6_a_socket_carries_json_objects_and_nothing_else",
        ),
        "type is an own string key": (OPEN,),
        "large client frames": ("listener/socket::test_message_at_the_limit_is_taken",),
        "a text frame in every silence": (
            "protocol_section_10::test_section_10_row_13_text_frames_break_every_silence",
        ),
    },
    "6.12 compaction": {
        "context_management": (
            "compaction::test_threshold_compacts_inside_a_response",
            "compaction::test_chain_outgrows_its_context_and_goes_on_compacted",
        ),
        "compaction_trigger": ("compaction::test_trigger_compacts_a_chain_which_goes_on",),
        "the window starts a new chain": (
            "compaction::test_window_of_the_endpoint_begins_a_new_chain",
        ),
    },
    "6.13 recovery": {
        "stored parent on a new socket, else full input": (
            "protocol_endpoints::test_client_recovers_on_a_new_socket",
        ),
    },
    "8.2 compliance suite": {
        "file-search, offline-web-search": (
            "web_search::test_model_searches_reads_finds_and_cites",
        ),
        "response-output-phase-schema": (OPEN,),
        **{
            name: (f"open_responses::test_open_responses_{name.replace('-', '_')}",)
            for name in (
                "basic-response",
                "assistant-phase",
                "streaming-response",
                "tool-calling",
                "tool-calling-streaming",
                "function-call-roundtrip",
                "previous-response-id",
                "image-input",
                "file-input",
                "system-prompt",
                "multi-turn",
                "websocket-response",
                "websocket-sequential-responses",
                "websocket-continuation",
                "websocket-reconnect-store-false-recovery",
                "websocket-previous-response-not-found",
                "websocket-failed-continuation-evicts-cache",
                "websocket-generate-false",
                "compact-response",
                "compact-missing-model",
                "websocket-compact-new-chain",
            )
        },
    },
}

# What we promise beside the contract.
ROWS["beside the contract"] = {
    "Idempotency-Key, idempotency_key": (
        "background::test_model_runs_once_for_one_key",
        "background::test_key_of_a_stored_response_survives_a_restart",
        "background::test_refused_request_does_not_spend_its_key",
    ),
    "rollout: response.done, response.append": (
        "rollout::test_thirty_calls_are_one_response_prepared_once",
        "rollout::test_bad_append_is_refused_and_the_rollout_goes_on_waiting",
        "rollout::test_tool_that_never_answers_ends_the_rollout",
        "rollout::test_rollout_ends_when_its_socket_goes",
    ),
    "heartbeats are numbered events": (
        "transports::test_heartbeats_are_numbered_events_of_the_turn_on_each_transport",
    ),
    "a lost connection lets a stored turn finish": (
        "connections::test_stored_turn_outlives_a_lost_connection_and_can_be_fetched",
    ),
    "a close frame cancels": (
        "connections::test_close_frame_cancels_a_stored_turn_and_keeps_its_finished_items",
    ),
    "documents are served": (
        "openapi/pages::test_documents_are_served_and_are_the_same_bytes_each_time",
        "protocol_shapes::test_everything_that_leaves_by_http_is_in_our_openapi_document",
        "protocol_shapes::test_everything_that_leaves_by_socket_is_in_our_asyncapi_document",
    ),
    "every answer carries x-request-id": (
        "protocol_endpoints::test_every_answer_names_its_request",
    ),
}

# The rows of section 10 bear their numbers in the names of their tests.
SECTION_10 = 15
