"""The twenty problems of a newcomer's first days, P1 to P20, each with the tests that keep it mended."""

from __future__ import annotations

import ast
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lamina.testing import Server

ROOT = Path(__file__).parents[2]

PROBLEMS: dict[str, list[str]] = {
    "P1 the landing page says why": [
        "newcomer/test_problems.py::test_p1_the_first_screen_has_the_rivals_and_the_way_to_a_first_answer"
    ],
    "P2 containers, one address for all, probes": [
        "newcomer/test_containers.py::test_an_open_address_takes_the_token_of_the_variable",
        "newcomer/test_containers.py::test_a_server_told_to_stop_is_not_ready_and_serves_until_it_has_drained",
        "deploy/test_images.py::test_the_wheel_serves_as_pid_1_without_root_on_a_read_only_root",
        "gateway/oip/test_grpc_server.py::test_a_health_check_of_grpc_follows_readiness_and_knows_its_services",
        "gateway/oip/test_reflection.py::test_a_client_learns_services_and_messages_from_the_server",
    ],
    "P3 async functions and streams at once": [
        "newcomer/test_concurrency.py::test_p3_forty_calls_wait_at_once_in_one_instance",
        "newcomer/test_concurrency.py::test_p3_streams_run_side_by_side",
        "test_testing_server.py::test_a_function_with_concurrency_serves_its_calls_at_once",
    ],
    "P4 a file and a number": [
        "newcomer/test_requests.py::test_p4_a_file_and_a_number_are_sent_with_a_form",
        "newcomer/test_models_and_forms.py::test_fields_of_a_model_are_a_form_too",
        "newcomer/test_models_and_forms.py::test_lists_are_named_as_axios_names_them",
    ],
    "P5 the body keeps its shape": ["newcomer/test_requests.py::test_p5_an_optional_parameter_more_breaks_no_client"],
    "P6 an SLO that cannot be met": [
        "newcomer/test_slos_that_tell.py::test_an_impossible_slo_is_refused_at_the_start_with_the_measured_time",
        "newcomer/test_slos_that_tell.py::test_refusals_are_logged_in_one_line_per_target_with_their_reasons",
        "newcomer/test_slos_that_tell.py::test_the_offer_is_in_the_text_of_the_error",
    ],
    "P7 OpenAPI and a page to try it": [
        "newcomer/test_openapi.py::test_p7_pydantic_models_have_schemas",
        "newcomer/test_openapi.py::test_p7_the_page_calls_a_function_in_a_browser",
        "newcomer/test_models_and_forms.py::test_the_document_says_the_same",
    ],
    "P8 CORS": ["web/test_page_in_chromium.py::test_a_page_of_an_allowed_origin_calls_streams_and_talks"],
    "P9 ONNX batching": [
        "newcomer/test_onnx_batching.py::test_an_unknown_first_axis_that_means_a_batch_is_one",
        "newcomer/test_onnx_batching.py::test_what_is_no_batch_is_said_with_its_reason",
        "newcomer/test_onnx_batching.py::test_requests_that_would_change_each_others_results_are_run_one_at_a_time",
    ],
    "P10 a development loop": [
        "newcomer/test_developer_loop.py::test_dev_serves_the_new_code_after_a_change_and_survives_a_mistake",
        "test_testing_server.py::test_serving_from_a_notebook_returns_at_once",
        "test_testing_server.py::test_a_cell_that_runs_again_defines_its_functions_anew",
        "newcomer/test_first_week.py::test_a_workflow_is_drawn_in_a_notebook",
    ],
    "P11 tutorials, how-to, reference, site": [
        "test_docs.py::test_every_page_but_decisions_is_in_the_navigation_of_the_site",
        "test_docs.py::test_every_python_block_runs",
    ],
    "P12 packages of a deployed app": [
        "engines/test_app_environments.py::test_packages_are_read_without_comments_and_without_lamina_itself"
    ],
    "P13 canary and shadow": [
        "gateway/deploy/test_traffic.py::test_a_canary_that_fails_loses_its_traffic_and_the_rest_never_notices",
        "gateway/deploy/test_traffic.py::test_a_shadow_gets_a_copy_of_every_call_and_its_failures_reach_no_client",
    ],
    "P14 in front of a server of language models": [
        "newcomer/test_problems.py::test_p14_the_function_of_the_documentation_streams_from_a_server_of_language_models"
    ],
    "P15 editors see types": [
        "sdk/test_user_types.py::test_an_editor_sees_the_same_types",
        "sdk/test_user_types.py::test_an_app_of_a_user_passes_the_strictest_check",
        "newcomer/test_typed_results.py::test_results_have_the_type_of_the_annotation",
    ],
    "P16 explain on a live server": [
        "gateway/routes/test_explain.py::test_a_call_that_was_served_says_where_and_how_long",
        "gateway/routes/test_explain.py::test_the_event_log_of_a_server_is_there_a_moment_after_a_call_and_survives_kill_9",
    ],
    "P17 emulated GPUs": [
        "examples/test_emulated.py::test_two_emulated_gpus_serve_functions_and_workflows",
        "newcomer/test_small_fixes.py::test_common_gpus_have_presets_and_those_never_measured_are_marked",
    ],
    "P18 a client's mistake is no failure": [
        "newcomer/test_requests.py::test_p18_a_raised_404_is_no_failure_of_the_service",
        "newcomer/test_models_and_forms.py::test_what_does_not_fit_the_annotation_is_the_callers_mistake",
    ],
    "P19 durable runs and ASL": [
        "core/test_journal.py::test_a_wait_after_a_question_about_data_began_when_what_led_to_it_happened",
        "newcomer/test_small_fixes.py::test_a_task_of_aws_own_editor_calls_the_function_that_it_names",
        "newcomer/test_small_fixes.py::test_remarks_of_the_linter_have_the_line_of_their_state",
        "newcomer/test_small_fixes.py::test_three_attempts_are_three_tries",
        "asl/test_flow_export.py::test_the_document_does_what_the_python_does",
    ],
    "P20 a plain call inside a function": [
        "newcomer/test_small_fixes.py::test_a_plain_call_of_a_class_inside_a_function_goes_to_the_served_instance",
        "newcomer/test_classes_with_arguments.py::test_one_class_is_served_twice_with_two_files",
    ],
}


def test_there_are_twenty() -> None:
    assert [problem.split()[0] for problem in PROBLEMS] == [f"P{number}" for number in range(1, 21)]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_problem_has_tests_that_exist(problem: str) -> None:
    for test in PROBLEMS[problem]:
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in names, test


def test_p1_the_first_screen_has_the_rivals_and_the_way_to_a_first_answer() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    screen = text[: text.index("## A first app")]
    assert "LitServe" in screen and "](docs/img/peers.png)" in screen and "pip install" in screen
    assert all(name in text for name in ("Ray Serve", "Triton", "KServe"))


class _Model(BaseHTTPRequestHandler):
    """A server of language models, as far as its API goes: it repeats the prompt, word by word."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for word in asked["messages"][0]["content"].split():
            piece = {"choices": [{"delta": {"content": word}}]}
            self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *args: Any) -> None:
        pass


def test_p14_the_function_of_the_documentation_streams_from_a_server_of_language_models(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("httpx", reason="pip install 'lamina[clients]'")
    page = (ROOT / "docs" / "how-to" / "web.md").read_text(encoding="utf-8")
    block = next(one for one in re.findall(r"```python\n(.*?)```", page, re.S) if "VLLM_URL" in one)
    model = ThreadingHTTPServer(("127.0.0.1", 0), _Model)
    threading.Thread(target=model.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("VLLM_URL", f"http://127.0.0.1:{model.server_port}")
    space: dict[str, Any] = {}
    exec(compile(block, "web.md", "exec"), space)
    try:
        with Server(space["app"]) as server:
            assert list(server.client.stream("chat", {"prompt": "one two three"})) == ["one", "two", "three"]
    finally:
        model.shutdown()
        model.server_close()
