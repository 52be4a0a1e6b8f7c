"""Routes of tasks that wait for a report, `/v1/tasks/TOKEN`: success with a value, failure with a name, heartbeat.

The token says which step of which run it is. It is not enough: the caller must also reach the run, as its tenant or as the
operator. A report of a durable run is answered when it is on disk.
"""

from __future__ import annotations

from functools import partial

import msgspec

from lamina import encoding
from lamina.access.authorization import Grant
from lamina.core.actions import JobRef
from lamina.core.events import Heartbeat, TaskReported
from lamina.core.lifecycle import JobState
from lamina.core.workflow.flow import Task
from lamina.core.workflow.runs import NodeExecution, WorkflowRun
from lamina.drivers.realtime import RealtimeDriver
from lamina.durable.runs import DurableRuns
from lamina.errors import BadValue, Conflict, LaminaError, NotFound, checked_text
from lamina.gateway.routes.codec_pool import check_light, check_light_json
from lamina.gateway.routes.http_codec import VALUE, check_encoding
from lamina.gateway.routes.problems import answered, error_problem, respond_problem
from lamina.gateway.routes.router import RouteHandler
from lamina.server.exchange import Exchange, HttpRequest
from lamina.values.references import ErrorInfo, ValuesExhausted
from lamina.values.task_tokens import TaskTokens

MAX_NAME, MAX_CAUSE = 256, 4_096


class TaskFailure(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a failure: what the error is called, for `except` and `Catch`, and what happened."""

    error: str = "States.TaskFailed"
    cause: str = ""


class TaskRoutes:
    """Routes of tasks that wait. Without `durable` runs end with the process, and so do their tasks."""

    def __init__(self, driver: RealtimeDriver, tokens: TaskTokens, durable: DurableRuns | None) -> None:
        self._driver = driver
        self._tokens = tokens
        self._durable = durable
        self.routes: dict[str, RouteHandler] = {
            "POST /v1/tasks/{task}/success": self._succeed,
            "POST /v1/tasks/{task}/failure": self._fail,
            "POST /v1/tasks/{task}/heartbeat": self._beat,
        }

    def _find(self, token: str, grant: Grant) -> tuple[WorkflowRun, NodeExecution]:
        missing = NotFound("token: it is of no task of this tenant", hint="use it as the step was given it")
        try:
            call_id, execution_id = self._tokens.read(token)
        except BadValue:
            raise missing from None
        run = self._driver.controller.workflow_run(call_id)
        if run is None:
            raise Conflict("token: its run is over, or not there yet", hint="after a restart runs are read again: try once more")
        grant.check_owner(run.call.tenant, missing)
        execution = run.executions.get(execution_id)
        node = execution.node if execution is not None else None
        job = run.jobs.get(execution.job_id) if execution is not None and not run.is_replaying else None
        is_open = job is not None and job.state is not JobState.PARKED
        if execution is None or not isinstance(node, Task) or not node.waits_for_report or not is_open:
            raise Conflict("token: its task has ended, or was reported before", hint="a task is reported once")
        return run, execution

    def _succeed(self, request: HttpRequest, exchange: Exchange, grant: Grant, token: str) -> None:
        check_encoding(request)
        is_value = request.header(b"content-type").partition(b";")[0].strip() == VALUE
        check_light(request) if is_value else check_light_json(request.body)
        value = encoding.decode_input(request.body) if is_value else encoding.from_json(request.body or b"null")
        blob = encoding.encode(value)
        run, execution = self._find(token, grant)
        job = JobRef(execution.job_id, run.call.id, execution.scope.id, execution.node.name)
        try:
            self._driver.data.put(job, blob)
        except ValuesExhausted as error:
            raise Conflict(f"there is no room for this value now: {error}", hint="try again later") from None
        self._report(exchange, TaskReported(run.call.id, execution.id))

    def _fail(self, request: HttpRequest, exchange: Exchange, grant: Grant, token: str) -> None:
        check_light_json(request.body)
        try:
            said = msgspec.json.decode(request.body or b"{}", type=TaskFailure)
        except msgspec.MsgspecError as error:
            raise BadValue(f"body: {error}", hint='send {"error": "NAME", "cause": "what happened"}') from None
        checked_text("error", said.error)
        checked_text("cause", said.cause)
        if not 1 <= len(said.error) <= MAX_NAME or len(said.cause) > MAX_CAUSE:
            raise BadValue(f"error: 1 to {MAX_NAME} characters, and a cause of at most {MAX_CAUSE}")
        run, execution = self._find(token, grant)
        job = JobRef(execution.job_id, run.call.id, execution.scope.id, execution.node.name)
        self._driver.data.put_error(job, ErrorInfo(said.error, said.cause))
        self._report(exchange, TaskReported(run.call.id, execution.id, "function-failed", said.error))

    def _beat(self, request: HttpRequest, exchange: Exchange, grant: Grant, token: str) -> None:
        run, execution = self._find(token, grant)
        self._driver.post(Heartbeat(run.call.id, execution.job_id))
        exchange.respond(204)

    def _report(self, exchange: Exchange, event: TaskReported) -> None:
        is_kept = self._durable is not None and self._durable.is_resident(event.call_id)
        self._driver.post(event)
        if not is_kept or self._durable is None:
            exchange.respond(204)
            return
        self._durable.store.confirm(answered(exchange, partial(_respond_confirmed, exchange)), after_writes=True)


def _respond_confirmed(exchange: Exchange, error: LaminaError | None) -> None:
    if error is not None:
        respond_problem(exchange, error_problem(error))
    else:
        exchange.respond(204)
