"""Fair sharing between tenants: quotas at admission, weighted fair queueing at dispatch. Owner of tenants' accounts.

A *quota* is a limit: what goes beyond it is rejected at admission, whatever else has room. *Fairness* is an order: device
time goes to the tenant that has had least of it for its weight (start-time fair queueing, in measured device time), and a
tenant that comes back after a silence starts level with the others, so that it neither saves up nor has to catch up. Within
one tenant higher priorities go first. Policies know nothing of it: they see queues in which the right jobs come first, are
asked about the functions whose turn it is before the others, and, when a call is to be admitted, see what would really be
served before it.

All of this is off, and costs one comparison a call, while there is a single tenant without a quota and without priorities.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lamina.core.actions import Reject
from lamina.core.scheduling.admission import AdmissionMargin
from lamina.core.scheduling.queues import Order, Queue
from lamina.core.scheduling.state import Batch, ControllerState
from lamina.core.tenancy.fair_queue import FairQueue
from lamina.core.tenancy.usage import TenantAccount, TenantUsage
from lamina.types import NEVER_US, Call, Tenant

TENANT_EXPIRY_US = 10_000_000
"""An account without limits expires after so long without a call."""

BACKPRESSURE_US = 50_000
"""A tenant with less than others in flight was rejected on devices where others are served: for so long tenants with more must
not add calls there that would have to be served meanwhile. What can wait for longer waits: the other's calls go first."""

BOOKING_HORIZON_US = 1_000
"""While several tenants have calls under way, a slice is booked no earlier than this before it is free: what is booked is
served before the next arrival, however little its tenant has had."""

MAX_GROUPS = 4
"""Groups of functions a policy is asked about one after another; the rest forms one last group."""


@dataclass(slots=True)
class FairShare:
    state: ControllerState
    margin: AdmissionMargin
    order: Order
    enabled: bool = False
    sole_tenant: str = ""  #: while it is off: the one tenant there is
    usage: TenantUsage = field(default_factory=TenantUsage)
    _priority_seen_us: int = -NEVER_US  #: when a priority was last used
    _charged: dict[int, float] = field(default_factory=dict)  #: per job of batches under way, on account
    _backpressure_us: dict[str, int] = field(default_factory=dict)  #: by device: until when tenants with more must not add to it
    _target: str = ""  #: of the call that is being admitted
    _active_tenants: int = 0  #: tenants with calls under way

    # --------------------------------------------------------------------- calls

    def on_call_arrived(self, now_us: int, call: Call) -> Reject | None:
        """Check a call of a second tenant, or any while enabled. Until the decision, queues show what is ahead of it."""
        if not self.enabled and not call.priority and not self.state.runs and call.tenant not in self.usage.specs:
            self.sole_tenant = call.tenant  # no other tenant has calls here
            return None
        if not self.enabled:
            self._enable(now_us)
        account = self.usage.account(call.tenant)
        if call.priority:
            self._priority_seen_us = now_us
        account.on_call_arrived(now_us)
        why, retry_after_us = account.exceeded_limit(now_us)
        if why:
            return Reject(call.id, "quota", retry_after_us, why=why)
        self._target = call.target
        if self._backpressure_us and account.weighted_in_flight > self.usage.mean_in_flight():
            until_us = max([self._backpressure_us.get(host, 0) for host in self._hosts(call.target)], default=0)
            if now_us < until_us and call.expires_us <= until_us:
                return Reject(call.id, "share", retry_after_us=until_us - now_us)
        if not account.in_flight:
            account.catch_up(self.usage.virtual_time_us)
        self.usage.admit_for(account, call.priority)
        self.margin.on_tenant_asks(call.tenant)
        return None

    def on_admission_decided(self, now_us: int, admitted: bool) -> None:
        """Account for the admission decision of the call that arrived."""
        account = self.usage.admitting
        if account is None:
            return
        self.usage.admit_for(None)
        if admitted:
            self._count_in_flight(account, 1)
            account.charge_call(now_us)
        elif account.weighted_in_flight < self.usage.mean_in_flight():
            full = [host for host in self._hosts(self._target) if self._is_contended(host)]
            if full:  # else it is not for the others that it was rejected: a load, say, or an SLO that nothing could meet
                self._backpressure_us = {host: us for host, us in self._backpressure_us.items() if us > now_us}
                self._backpressure_us.update(dict.fromkeys(full, now_us + BACKPRESSURE_US))

    def _hosts(self, target: str) -> set[str]:
        """Devices that calls of this target come to."""
        flow = self.margin.flows.get(target)
        return {host for name in (flow.functions if flow else ()) for host in self.state.functions[name].instances_by_device}

    def _is_contended(self, host: str) -> bool:
        device = self.state.devices[host]
        return device.busy == device.all_units or bool(self.state.backlogged.get(host))

    def on_call_ended(self, call: Call) -> None:
        account = self.usage.accounts.get(call.tenant)
        if account is not None and account.in_flight:
            self._count_in_flight(account, -1)

    def _count_in_flight(self, account: TenantAccount, more: int) -> None:
        before = account.in_flight
        account.count_in_flight(more)
        if not before or not account.in_flight:
            self._active_tenants += 1 if account.in_flight else -1
            self.state.limit_booking(BOOKING_HORIZON_US if self._active_tenants > 1 else NEVER_US)

    # ------------------------------------------------------------------- batches

    def on_batch_started(self, batch: Batch) -> None:
        """Charge the prediction at once, so that no tenant starts ten batches on an old bill."""
        queue = self.state.functions[batch.instance.function].queue
        assert isinstance(queue, FairQueue)
        part = batch.part * batch.mask.bit_count() / batch.device.spec.units / len(batch.jobs)
        job_us = batch.predicted_us * part or queue.job_device_us
        accounts = [self.usage.account(job.run.call.tenant) for job in batch.jobs]
        self.usage.on_served(accounts)
        for account in accounts:
            account.charge(job_us)
        self._charged[batch.id] = job_us
        self.usage.on_charged()

    def on_batch_finished(self, now_us: int, batch: Batch, device_us: int) -> None:
        """Correct the charge to what was measured."""
        units = batch.part * batch.mask.bit_count()
        count = len(batch.jobs)
        job_us = device_us * units / batch.device.spec.units / count
        owed_us = job_us - self._charged.pop(batch.id, 0.0)
        for job in batch.jobs:
            account = self.usage.account(job.run.call.tenant)
            account.charge(owed_us)
            account.day.add(now_us, units * device_us / count)
        queue = self.state.functions[batch.instance.function].queue
        assert isinstance(queue, FairQueue)
        queue.observe(job_us)
        self.usage.on_charged()

    def service_order(self) -> list[list[str]]:
        """Waiting functions in groups: first those whose head job belongs to the tenant with the least usage."""
        if len(self.state.waiting) < 2:
            return [list(self.state.waiting)]
        by_claim: dict[tuple[float, int], list[str]] = {}
        for name, function in self.state.waiting.items():
            call = function.queue.head().run.call
            by_claim.setdefault((self.usage.account(call.tenant).weighted_used_us, -call.priority), []).append(name)
        groups = [by_claim[claim] for claim in sorted(by_claim)]
        rest = [name for group in groups[MAX_GROUPS:] for name in group]
        return [*groups[:MAX_GROUPS], rest] if rest else groups or [[]]

    # ------------------------------------------------------------------- accounts

    def weight_of(self, tenant: str) -> float:
        known = self.usage.specs.get(tenant)
        return known.weight if known is not None else 1.0

    def update_tenant(self, now_us: int, tenant: Tenant, spent_unit_us: float = 0.0) -> None:
        """Set the limits of a tenant; `spent_unit_us` is its usage of today before a restart."""
        self.usage.set_limits(tenant)
        if not self.enabled:
            self._enable(now_us)
        account = self.usage.account(tenant.name)
        account.update(now_us, tenant)
        if spent_unit_us:
            account.day.add(now_us, spent_unit_us)

    def wrap_queues(self) -> None:
        """Give every function a fair queue, those deployed meanwhile too."""
        for function in self.state.functions.values():
            if not isinstance(function.queue, FairQueue):
                function.replace_queue(FairQueue(function.spec.name, self.order, self.usage, function.queue.jobs()))

    def _enable(self, now_us: int) -> None:
        self.enabled = True
        self.margin.keep_per_tenant(True)
        for run in self.state.runs.values():
            account = self.usage.account(run.call.tenant)
            self._count_in_flight(account, 1)
            account.on_call_arrived(now_us)
        self.wrap_queues()

    def expire(self, now_us: int) -> None:
        """Expire idle accounts; disable when one tenant alone, no priority and no limit is left."""
        for batch_id in [one for one in self._charged if one not in self.state.batches]:
            del self._charged[batch_id]
        for name in [one.spec.name for one in self._expired_accounts(now_us)]:
            self.usage.remove(name)
        if self.usage.specs or len(self.usage.accounts) > 1 or now_us - self._priority_seen_us < TENANT_EXPIRY_US:
            return
        self.sole_tenant = next(iter(self.usage.accounts), self.sole_tenant)
        self.enabled = False
        self.margin.keep_per_tenant(False)
        self.usage.clear()
        self._active_tenants = 0
        self.state.limit_booking(NEVER_US)
        for function in self.state.functions.values():
            queue = Queue(function.spec.name, self.order)
            for job in function.queue.jobs():
                queue.add(job)
            function.replace_queue(queue)

    def _expired_accounts(self, now_us: int) -> Iterator[TenantAccount]:
        for account in self.usage.accounts.values():
            if (
                not account.in_flight
                and now_us - account.last_seen_us >= TENANT_EXPIRY_US
                and account.spec.name not in self.usage.specs
            ):
                yield account
