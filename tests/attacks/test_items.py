"""What an attack on the server found, item by item (C: critical, H: high, M: medium, then the rest), and the tests that keep it
mended. Each of them fails without its mend."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.core.chaos import play

ITEMS = {
    "C1 leavers leak their bodies": "test_memory.py::test_c1_ten_thousand_leavers_in_the_middle_of_a_body_leave_nothing",
    "C2 endless bodies hold memory": "test_memory.py::test_c2_endless_bodies_take_their_share_and_the_others_are_served",
    "C2 tokens are looked at last": "test_memory.py::test_c2_a_token_is_checked_before_a_body_is_read",
    "C3 a takeover corrupts state": (
        "test_c3_takeover.py::test_c3_a_server_that_takes_over_has_read_everything_the_one_before_has_written"
    ),
    "C3 a standby serves": "test_c3_takeover.py::test_c3_a_standby_does_nothing_and_says_where_the_leader_is",
    "C4 one run stops all runs": "test_c4_quarantine.py::test_runs_that_cannot_begin_are_quarantined_and_the_others_begin",
    "C4 cost limit without functions": "test_c4_quarantine.py::test_a_workflow_without_functions_has_a_cost_limit_like_any_other",
    "H1 state has no tenants": "test_tenant_owners.py::test_h1_state_of_a_tenant_is_not_there_for_another",
    "H1 triggers see the state of others": "test_tenant_owners.py::test_h1_a_trigger_sees_the_changes_of_its_own_tenant_alone",
    "H2 secrets of the operator": "test_tenant_owners.py::test_h2_the_first_instance_of_a_deploy_has_its_own_tenant_s_secrets",
    "H3 environment": "test_function_walls.py::test_h3_functions_do_not_inherit_the_keys_of_the_server",
    "H3 files and processes of others": "test_function_walls.py::test_h3_a_tenant_s_code_finds_nothing_of_others",
    "H3 code of tenants as the operator": "test_function_walls.py::test_h3_a_tenant_s_code_on_this_machine_is_not_its_operator",
    "H4 descriptions that hang or fill": "test_h4_deployers.py::test_an_app_that_lies_about_itself_is_refused_in_time",
    "H5 floods of frames": "test_h5_floods.py::test_a_flood_is_cut_off",
    "H5 settings": "test_h5_floods.py::test_many_settings_in_one_frame_are_too_many",
    "H5 window updates": "test_h5_floods.py::test_a_window_update_flushes_no_more_streams_than_it_has_room_for",
    "H5 empty messages": "test_h5_floods.py::test_empty_messages_are_cut_off_early_and_messages_without_end_in_time",
    "H5 Huffman": "test_h5_floods.py::test_a_header_block_is_measured_before_it_is_decoded",
    "H5 a read is one turn": "test_h5_floods.py::test_a_read_with_thousands_of_frames_is_handled_in_slices",
    "H6 rebinding": "test_browser.py::test_h6_a_name_that_was_made_to_resolve_here_is_not_answered",
    "H6 cross-site": "test_browser.py::test_h6_a_page_from_elsewhere_starts_nothing",
    "H7 models of the operator": "test_tenant_owners.py::test_h7_a_tenant_s_token_unloads_its_own_models_alone",
    "H7 names of models": "test_tenant_owners.py::test_h7_a_tenant_s_function_is_no_version_of_the_operator_s_model",
    "H8 data of state machines": "test_h8_state_machines.py::test_h8_data_that_doubles_in_a_loop_meets_the_limit_of_the_language",
    "H8 paths": "test_h8_state_machines.py::test_h8_a_path_that_visits_too_many_places_is_given_up",
    "H8 maps": (
        "test_h8_state_machines.py::test_h8_a_map_over_more_items_than_it_takes_is_refused_before_anything_is_made_of_them"
    ),
    "M1 keys that are not UTF-8": "test_m1_m3_answers.py::test_m1_a_key_that_is_not_utf8_is_a_bad_request",
    "M2 NUL": "test_m2_text.py::test_m2_a_key_that_a_store_cannot_hold_is_refused_by_all_of_them",
    "M3 damaged rows": "test_m1_m3_answers.py::test_m3_a_damaged_row_is_answered",
    "M4 the file of the store": (
        "test_m4_store_file.py::test_m4_a_server_accepts_no_run_and_no_state_after_it_and_goes_on_with_calls"
    ),
    "M5 idle connections": "test_memory.py::test_m5_idle_connections_make_room_for_newcomers",
    "M6 impossible decisions": "test_items.py::test_m6_policies_make_no_impossible_decision_for_tenants",
    "M7 clock jumps": "test_m7_m8_triggers.py::test_m7_a_clock_that_is_set_by_an_hour_goes_on_and_every_start_is_a_new_one",
    "M8 triggers that pile up": "test_m7_m8_triggers.py::test_m8_a_clock_skips_while_its_last_start_is_under_way",
    "M9 internals": "test_m9_internals.py::test_m9_traces_and_paths_are_for_those_that_may_deploy",
    "M10 rules of HTTP/2": "test_m10_http2_rules.py::test_the_table_has_all_68_rules_and_more",
    "low: Host in brackets": "test_low.py::test_a_host_with_something_behind_its_brackets_is_foreign",
    "low: daemons": "test_low_daemons.py::test_a_daemon_made_by_a_function_ends_with_the_server",
    "low: terminal escapes": "test_low.py::test_terminal_escapes_of_users_are_shown_and_not_obeyed",
    "low: a and a/b in a zip": "test_h4_deployers.py::test_a_file_that_is_also_a_folder_is_refused",
    "low: HTTP/2.0": "test_low.py::test_a_request_line_with_another_version_is_not_taken",
    "low: folders of apps": "test_h4_deployers.py::test_a_package_is_unpacked_apart_into_folders_of_its_own",
    "low: odd keys in a result": "test_low.py::test_a_result_without_a_json_form_is_an_error_of_the_function",
    "low: half-closed": "test_low.py::test_a_client_that_has_closed_its_half_is_answered",
    "low: prints": "test_low.py::test_a_function_that_prints_without_end_fills_nothing",
    "422s are no failures": "test_low.py::test_a_clients_422_is_no_failure_of_the_service",
}


@pytest.mark.parametrize("item", ITEMS)
def test_every_item_has_a_test(item: str):
    file, _, name = ITEMS[item].partition("::")
    tree = ast.parse((Path(__file__).parent / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("policy", ["frontier", "edf", "gpulet"])
@pytest.mark.slow
def test_m6_policies_make_no_impossible_decision_for_tenants(policy: str):
    """Jobs of several tenants in one queue were planned into two batches, or into one that could not be in time any more: each
    was a `PolicyError`, which the controller of these worlds raises."""
    for seed in range(25):
        play(seed, policy, 40, clients=True).drain()
