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

from lamina.core.accounts import Account, Books
from lamina.core.actions import Refuse
from lamina.core.fair_queue import FairQueue
from lamina.core.policy import View
from lamina.core.promises import Promises
from lamina.core.queue import Order, Queue
from lamina.core.state import Batch, State
from lamina.types import NEVER_US, Call, Tenant

QUIET_US = 10_000_000
"""An account without limits expires after so long without a call."""

BRAKE_US = 50_000
"""A tenant with less than others in flight was rejected: for so long tenants with more must not add to it."""

BOOK_AHEAD_US = 1_000
"""While several tenants have calls under way, a slice is booked no earlier than this before it is free: what is booked is
served before the next arrival, however little its tenant has had."""

MOST_TURNS = 4
"""Groups of functions a policy is asked about one after another; the rest forms one last group."""


@dataclass(slots=True)
class Fair:
    state: State
    view: View
    promises: Promises
    order: Order
    on: bool = False
    only: str = ""  #: while it is off: the one tenant there is
    books: Books = field(default_factory=Books)
    _priority_us: int = -NEVER_US  #: when a priority was last used
    _charged: dict[int, float] = field(default_factory=dict)  #: per job of batches under way, on account
    _brake_until_us: int = 0
    _busy: int = 0  #: tenants with calls under way

    # --------------------------------------------------------------------- calls

    def arrived(self, now_us: int, call: Call) -> Refuse | None:
        """Check a call of a second tenant, or any while enabled. Until the decision, queues show what is ahead of it."""
        if not self.on and not call.priority and not self.state.runs and call.tenant not in self.books.specs:
            self.only = call.tenant  # no other tenant has calls here
            return None
        if not self.on:
            self._turn_on(now_us)
        account = self.books.of(call.tenant)
        if call.priority:
            self._priority_us = now_us
        account.seen_us = now_us
        why, retry_after_us = account.over(now_us)
        if why:
            return Refuse(call.id, "quota", retry_after_us, why=why)
        if now_us < self._brake_until_us and account.crowd > self.books.usual_crowd():
            return Refuse(call.id, "share", retry_after_us=self._brake_until_us - now_us)
        if not account.runs:
            account.used_us = max(account.used_us, self.books.virtual_us)
        self.books.asking, self.books.asking_priority = account, call.priority
        self.promises.asking = call.tenant
        return None

    def answered(self, now_us: int, admitted: bool) -> None:
        """Account for the admission decision of the call that arrived."""
        account = self.books.asking
        if account is None:
            return
        self.books.asking = None
        if admitted:
            self._under_way(account, 1)
            account.count(now_us)
        elif account.crowd < self.books.usual_crowd():
            self._brake_until_us = now_us + BRAKE_US

    def ended(self, call: Call) -> None:
        account = self.books.accounts.get(call.tenant)
        if account is not None and account.runs:
            self._under_way(account, -1)

    def _under_way(self, account: Account, more: int) -> None:
        before = account.runs
        account.runs += more
        if not before or not account.runs:
            self._busy += 1 if account.runs else -1
            self.view.book_ahead_us = BOOK_AHEAD_US if self._busy > 1 else NEVER_US

    # ------------------------------------------------------------------- batches

    def started(self, batch: Batch) -> None:
        """Charge the prediction at once, so that no tenant starts ten batches on an old bill."""
        queue = self.state.functions[batch.instance.function].queue
        assert isinstance(queue, FairQueue)
        part = batch.mask.bit_count() / batch.device.spec.units / len(batch.jobs)
        job_us = batch.predicted_us * part or queue.job_us
        accounts = [self.books.of(job.run.call.tenant) for job in batch.jobs]
        self.books.virtual_us = max(self.books.virtual_us, min(account.used_us for account in accounts))
        for account in accounts:
            account.used_us += job_us / account.spec.weight
        self._charged[batch.id] = job_us
        self.books.turn += 1

    def finished(self, now_us: int, batch: Batch, device_us: int) -> None:
        """Correct the charge to what was measured."""
        units = batch.mask.bit_count()
        count = len(batch.jobs)
        job_us = device_us * units / batch.device.spec.units / count
        owed_us = job_us - self._charged.pop(batch.id, 0.0)
        for job in batch.jobs:
            account = self.books.of(job.run.call.tenant)
            account.used_us += owed_us / account.spec.weight
            account.day.add(now_us, units * device_us / count)
        queue = self.state.functions[batch.instance.function].queue
        assert isinstance(queue, FairQueue)
        queue.job_us += 0.2 * (job_us - queue.job_us)
        self.books.turn += 1

    def turns(self) -> list[list[str]]:
        """Waiting functions in groups: first those whose head job belongs to the tenant with the least usage."""
        if len(self.state.waiting) < 2:
            return [list(self.state.waiting)]
        by_claim: dict[tuple[float, int], list[str]] = {}
        for name, function in self.state.waiting.items():
            call = function.queue.head().run.call
            by_claim.setdefault((self.books.of(call.tenant).used_us, -call.priority), []).append(name)
        groups = [by_claim[claim] for claim in sorted(by_claim)]
        rest = [name for group in groups[MOST_TURNS:] for name in group]
        return [*groups[:MOST_TURNS], rest] if rest else groups or [[]]

    # ------------------------------------------------------------------- accounts

    def set(self, now_us: int, tenant: Tenant, spent_unit_us: float = 0.0) -> None:
        """Set the limits of a tenant; `spent_unit_us` is its usage of today before a restart."""
        self.books.specs[tenant.name] = tenant
        if not self.on:
            self._turn_on(now_us)
        account = self.books.of(tenant.name)
        account.change(now_us, tenant)
        if spent_unit_us:
            account.day.add(now_us, spent_unit_us)

    def adopt(self) -> None:
        """Give every function a fair queue, those deployed meanwhile too."""
        for function in self.state.functions.values():
            if not isinstance(function.queue, FairQueue):
                function.queue = FairQueue(function.spec.name, self.order, self.books, function.queue.jobs())

    def _turn_on(self, now_us: int) -> None:
        self.on = self.promises.apart = True
        for run in self.state.runs.values():
            account = self.books.of(run.call.tenant)
            self._under_way(account, 1)
            account.seen_us = now_us
        self.adopt()

    def tidy(self, now_us: int) -> None:
        """Expire idle accounts; disable when one tenant alone, no priority and no limit is left."""
        for batch_id in [one for one in self._charged if one not in self.state.batches]:
            del self._charged[batch_id]
        for name in [one.spec.name for one in self._idle(now_us)]:
            del self.books.accounts[name]
        if self.books.specs or len(self.books.accounts) > 1 or now_us - self._priority_us < QUIET_US:
            return
        self.only = next(iter(self.books.accounts), self.only)
        self.on = self.promises.apart = False
        self.promises.asking = ""
        self.books.accounts.clear()
        self._busy, self.view.book_ahead_us = 0, NEVER_US
        for function in self.state.functions.values():
            jobs = function.queue.jobs()
            function.queue = Queue(function.spec.name, self.order)
            for job in jobs:
                function.queue.add(job)

    def _idle(self, now_us: int) -> Iterator[Account]:
        for account in self.books.accounts.values():
            if not account.runs and now_us - account.seen_us >= QUIET_US and account.spec.name not in self.books.specs:
                yield account
