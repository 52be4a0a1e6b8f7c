"""Fair queue of one function: a lane per tenant and priority, merged by least weighted usage.

What is taken together is handed out most urgent first, as policies expect of a queue: fairness says *which* jobs are next,
the policy's own order says in which order.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heapreplace

from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.queues import Order, Queue
from lamina.core.tenancy.usage import TenantUsage


class FairQueue(Queue):
    def __init__(self, function: str, order: Order, books: TenantUsage, jobs: Iterable[Job] = ()) -> None:
        super().__init__(function, order)
        self.job_device_us = 1.0  #: of a whole device, for one job: as measured
        self._usage = books
        self._lanes: dict[str, dict[int, Queue]] = {}  #: by tenant, then by priority
        self._count = 0
        self._merged: list[Job] = []
        self._merged_generation = -1
        for job in jobs:
            self.add(job)

    def observe(self, job_us: float) -> None:
        """What one of its jobs has taken of a whole device."""
        self.job_device_us += 0.2 * (job_us - self.job_device_us)

    def __len__(self) -> int:
        if self._usage.admitting is None or not self._count:
            return self._count
        return sum([count for _, count in self._served_before()])

    def add(self, job: Job) -> None:
        call = job.run.call
        lanes = self._lanes.setdefault(call.tenant, {})
        lane = lanes.get(call.priority)
        if lane is None:
            lane = lanes[call.priority] = Queue(self.function, self.order)
        lane.add(job)
        self._count += 1
        self._merged_generation = -1

    def remove_job(self, job: Job) -> None:
        call = job.run.call
        lanes = self._lanes[call.tenant]
        lane = lanes[call.priority]
        lane.remove_job(job)
        self._count -= 1
        self._merged_generation = -1
        if not len(lane):
            del lanes[call.priority]
            if not lanes:
                del self._lanes[call.tenant]

    def remove_all(self, jobs: list[Job]) -> None:
        for job in jobs:
            self.remove_job(job)

    def head(self) -> Job:
        if len(self._lanes) == 1:
            (lanes,) = self._lanes.values()
            return lanes[max(lanes)].head()
        return self._next_jobs(1)[0]

    def first(self, count: int) -> list[Job]:
        if len(self._lanes) == 1:
            (lanes,) = self._lanes.values()
            if len(lanes) == 1:
                return next(iter(lanes.values())).first(count)
        return sorted(self._next_jobs(count), key=self._key)

    def slice(self, start: int, count: int) -> list[Job]:
        """What would be taken next if `first(start)` were gone: cut by the order of service, which all counts share."""
        return sorted(self._next_jobs(start + count)[start : start + count], key=self._key)

    def due_from(self, due_us: int, start: int, count: int) -> list[Job]:
        """Likewise, in order of service: a tenant's jobs are not passed over because another one has late ones."""
        served = self._next_jobs(self.count_due_before(due_us) + start + count)
        return sorted([job for job in served if job.due_us >= due_us][start : start + count], key=self._key)

    def jobs(self) -> list[Job]:
        return self.first(self._count)

    def count_due_before(self, due_us: int) -> int:
        if self._usage.admitting is None:
            return sum(lane.count_due_before(due_us) for lanes in self._lanes.values() for lane in lanes.values())
        return sum(min(count, lane.count_due_before(due_us)) for lane, count in self._served_before())

    def _key(self, job: Job) -> tuple[int, int]:
        return (job.due_us if self.order == "due" else job.id, job.id)

    def _next_jobs(self, count: int) -> list[Job]:
        """The next `count` jobs in order of service."""
        count = min(count, self._count)
        if self._merged_generation == self._usage.generation and len(self._merged) >= count:
            return self._merged[:count]
        if len(self._lanes) == 1:
            self._merged = _by_priority(next(iter(self._lanes.values())), count)
        else:
            self._merged = self._merge(count)
        self._merged_generation = self._usage.generation
        return self._merged

    def _merge(self, count: int) -> list[Job]:
        heap: list[tuple[float, int, int, int, list[Job], float]] = []
        for tenant, lanes in self._lanes.items():
            account = self._usage.account(tenant)
            jobs = _by_priority(lanes, count)
            heap.append((account.weighted_used_us, *self._key(jobs[0]), 0, jobs, self.job_device_us / account.spec.weight))
        heapify(heap)
        taken: list[Job] = []
        while len(taken) < count:
            used_us, _, _, place, jobs, step_us = heap[0]
            taken.append(jobs[place])
            place += 1
            if place < len(jobs):
                heapreplace(heap, (used_us + step_us, *self._key(jobs[place]), place, jobs, step_us))
            else:
                heappop(heap)
        return taken

    def _served_before(self) -> Iterable[tuple[Queue, int]]:
        """Of each lane, how many jobs would be served before the call being admitted."""
        account = self._usage.admitting
        assert account is not None
        mine = self._lanes.get(account.spec.name, {})
        before = [lane for priority, lane in mine.items() if priority >= self._usage.admitting_priority]
        end_us = account.weighted_used_us + (sum(map(len, before)) + 1) * self.job_device_us / account.spec.weight
        for lane in before:
            yield lane, len(lane)
        for tenant, lanes in self._lanes.items():
            if lanes is mine:
                continue
            other = self._usage.account(tenant)
            room = max(0, int((end_us - other.weighted_used_us) * other.spec.weight / self.job_device_us))
            for lane in lanes.values():
                count = min(len(lane), room)
                room -= count
                yield lane, count


def _by_priority(lanes: dict[int, Queue], count: int) -> list[Job]:
    """Jobs of one tenant, higher priorities first."""
    if len(lanes) == 1:
        return next(iter(lanes.values())).first(count)
    jobs: list[Job] = []
    for priority in sorted(lanes, reverse=True):
        jobs += lanes[priority].first(count - len(jobs))
    return jobs
