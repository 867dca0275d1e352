"""Carries out what was decided for a job: the status first, then everything else at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from evertrain.acjob import names
from evertrain.acjob.pods import is_going, is_owned
from evertrain.kube.port import ASCEND_JOB, POD, SECRET, AlreadyExists, ApiError, Conflict, Kube, NotFound, Object
from evertrain.operator.actions import (
    Action,
    Create,
    Delete,
    Emit,
    Observed,
    Outcome,
    Patch,
    WriteRankFile,
    WriteStatus,
)
from evertrain.operator.events import Events
from evertrain.operator.rankfile import RankFiles
from evertrain.operator.reconcile import with_problem

logger = logging.getLogger(__name__)


class Again(Exception):
    """Not all could be done; look again soon. The text says why."""


class Carrier:
    def __init__(self, kube: Kube, files: RankFiles, wrote: Callable[[Object], None], *, parallel: int = 32) -> None:
        self._kube = kube
        self._files = files
        self._events = Events(kube)
        self._wrote = wrote
        self._places = asyncio.Semaphore(parallel)

    async def carry_out(self, seen: Observed, outcome: Outcome) -> None:
        """Raises Again, or OSError or TimeoutError if the API server can't be reached."""
        job = seen.job
        rest: list[Action] = []
        for action in outcome.actions:
            if isinstance(action, WriteStatus):
                written = await self._write_status(job, action.status)
                if written is None:
                    return
                job = written
            else:
                rest.append(action)
        events = [action for action in rest if isinstance(action, Emit)]
        results = await asyncio.gather(
            *(self._do(job, action) for action in rest if not isinstance(action, Emit)), return_exceptions=True
        )
        problems: list[_Problem] = []
        errors: list[BaseException] = []
        for result in results:
            if isinstance(result, Emit):
                events.append(result)
            elif isinstance(result, _Problem):
                problems.append(result)
            elif isinstance(result, BaseException):
                errors.append(result)
        events += [Emit("Warning", problem.event, f"Error creating: {problem.error}") for problem in problems[:1]]
        await self._events.emit(job, events, seen.now)
        for error in errors:
            raise error
        if problems:
            await self._show(job, seen, problems[0])
            raise Again(problems[0].message)

    async def _show(self, job: Object, seen: Observed, problem: _Problem) -> None:
        status = with_problem(job, seen, problem.reason, problem.message)
        if status is not None:
            await self._write_status(job, status)
            await self._events.emit(job, [Emit("Warning", problem.reason, problem.message)], seen.now)

    async def _write_status(self, job: Object, status: Object) -> Object | None:
        """The job after the write; None if it is gone."""
        try:
            written = await self._kube.replace_status(ASCEND_JOB, {**job, "status": status})
        except Conflict as error:
            raise Again("the job was changed meanwhile") from error
        except NotFound:
            return None
        self._wrote(written)
        return written

    async def _do(self, job: Object, action: Action) -> Emit | _Problem | None:
        async with self._places:
            match action:
                case Create():
                    return await self._create(job, action)
                case Delete():
                    return await self._delete(action)
                case Patch():
                    try:
                        await self._kube.patch(action.kind, action.name, action.namespace, action.patch)
                    except NotFound:
                        return None
                    except ApiError as error:
                        raise Again(f"{action.kind.kind} {action.name}: {error}") from error
                case WriteRankFile():
                    metadata = job["metadata"]
                    try:
                        self._files.write(metadata["namespace"], metadata["name"], action.table, action.version)
                    except OSError as error:
                        raise Again(f"the rank table can't be written: {error}") from error
        return None

    async def _create(self, job: Object, action: Create) -> Emit | _Problem | None:
        name = action.item["metadata"]["name"]
        try:
            await self._kube.create(action.kind, action.item)
        except AlreadyExists as error:
            return await self._occupied(job, action, error)
        except ApiError as error:
            return _Problem(action, error.message)
        if action.kind == POD:
            return Emit("Normal", "SuccessfulCreatePod", f"Created pod: {name}")
        return None

    async def _occupied(self, job: Object, action: Create, error: AlreadyExists) -> _Problem | None:
        """The name is taken. By the object that we just made, and the cache doesn't know it yet: fine. By one that is
        on its way out: its end will be the next event. By a stranger, or by one of ours that isn't to be found as such
        any more: a problem."""
        if action.kind == SECRET:
            # The uid of the job is part of its name. So the operator needs no right to read anybody's Secrets.
            return None
        metadata = action.item["metadata"]
        try:
            found = await self._kube.get(action.kind, metadata["name"], metadata.get("namespace"))
        except NotFound:
            raise Again(f"{action.kind.kind} {metadata['name']} has just gone") from error
        if is_owned(found, job["metadata"]["uid"]):
            wanted, labels = metadata.get("labels") or {}, found["metadata"].get("labels") or {}
            changed = [name for name in names.SELECTED if labels.get(name) != wanted.get(name)]
            if not changed or is_going(found):
                return None
            return _Problem(action, f"{error.message}, but its label {changed[0]} was changed")
        namesakes = found["metadata"].get("ownerReferences") or ()
        if is_going(found) or any(
            owner.get("kind") == ASCEND_JOB.kind and owner.get("name") == job["metadata"]["name"] for owner in namesakes
        ):
            raise Again(f"{action.kind.kind} {metadata['name']} of an earlier job is still there")
        return _Problem(action, error.message)

    async def _delete(self, action: Delete) -> Emit | None:
        logger.info("deleting %s %s/%s: %s", action.kind.kind, action.namespace, action.name, action.why)
        try:
            await self._kube.delete(action.kind, action.name, action.namespace, uid=action.uid, grace=action.grace)
        except (NotFound, Conflict):
            return None  # gone, or another one by that name
        except ApiError as error:
            raise Again(f"{action.kind.kind} {action.name} can't be deleted: {error}") from error
        if action.kind == ASCEND_JOB:
            return None
        return Emit(
            "Normal", f"SuccessfulDelete{action.kind.kind}", f"Deleted {action.kind.kind.lower()}: {action.name}"
        )


class _Problem:
    def __init__(self, action: Create, error: str) -> None:
        self.error = error
        self.reason = action.reason
        self.message = action.failure.format(error=error)
        self.event = f"FailedCreate{action.kind.kind}"
