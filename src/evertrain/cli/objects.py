"""`evertrain get|describe|logs|delete`: look at a cluster and clean it up without kubectl.

The words are those of kubectl, the answers too: tables are made by the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from evertrain import aio
from evertrain.cli import running
from evertrain.cli.running import CommandError, UsageError
from evertrain.embedded import instance

if TYPE_CHECKING:
    from evertrain.cli.connection import Connection
    from evertrain.kube.port import Kind, Object

    Work = Callable[[Connection, argparse.Namespace], Awaitable[int]]

DELETE_PATIENCE = 120.0

_WHICH = """\
which cluster: --kubeconfig, else $KUBECONFIG, else the embedded cluster that runs on --data-dir, else ~/.kube/config.
"""


def get(argv: Sequence[str]) -> int:
    parser = _parser(
        "get",
        "List objects, or show one.",
        "examples:\n"
        "  evertrain get acjob                       jobs with their state\n"
        "  evertrain get pods -o wide                pods with node and address\n"
        "  evertrain get pods -l job-name=my-job     pods of one job\n"
        "  evertrain get acjob my-job -o yaml        everything about a job, conditions included\n"
        "  evertrain get nodes,podgroups -A          several types at once",
    )
    _selecting(parser, "acjob, pods, nodes, services, events, podgroups, ...; or TYPE/NAME")
    parser.add_argument("-o", "--output", choices=("wide", "yaml", "json", "name"), default="")
    parser.add_argument("--no-headers", action="store_true")
    return _carry_out(parser, argv, _get)


def describe(argv: Sequence[str]) -> int:
    parser = _parser("describe", "Show an object with its events.", "example:\n  evertrain describe acjob my-job")
    _selecting(parser, "acjob, pod, node, ...; or TYPE/NAME")
    return _carry_out(parser, argv, _describe)


def logs(argv: Sequence[str]) -> int:
    parser = _parser(
        "logs",
        "Print what a pod wrote, or all pods of a job.",
        "examples:\n"
        "  evertrain logs my-job-master-0 -f         as it comes, until the pod ends\n"
        "  evertrain logs acjob/my-job --tail 20     the last lines of each pod of a job",
    )
    parser.add_argument("target", metavar="POD|acjob/NAME")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the pod ends")
    parser.add_argument("--tail", type=int, metavar="LINES", help="only the last lines")
    parser.add_argument("-p", "--previous", action="store_true", help="of the container before its last restart")
    parser.add_argument("-c", "--container", default="", help="if the pod has several")
    parser.add_argument("--timestamps", action="store_true")
    return _carry_out(parser, argv, _logs)


def delete(argv: Sequence[str]) -> int:
    parser = _parser(
        "delete",
        "Delete objects and what belongs to them, and wait until they are gone.",
        "examples:\n"
        "  evertrain delete acjob my-job             with its pods, service and pod group\n"
        "  evertrain delete -f job.yaml              what a file describes",
    )
    _selecting(parser, "acjob, pod, ...; or TYPE/NAME", needed=False)
    parser.add_argument("-f", "--filename", metavar="FILE", help="delete the objects of this file")
    parser.add_argument("--all", action="store_true", help="all objects of the type in the namespace")
    parser.add_argument("--grace-period", type=int, metavar="SECONDS", help="between SIGTERM and SIGKILL of a pod")
    parser.add_argument("--no-wait", action="store_true", help="don't wait until they are gone")
    parser.add_argument("--ignore-not-found", action="store_true")
    return _carry_out(parser, argv, _delete)


def _parser(command: str, description: str, examples: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"evertrain {command}",
        description=description,
        epilog=f"{examples}\n\n{_WHICH}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cluster_options(parser)
    parser.add_argument("-n", "--namespace", metavar="NAME", help="default: that of the kubeconfig, or `default`")
    return parser


def cluster_options(parser: argparse.ArgumentParser, **defaults: str) -> None:
    parser.add_argument(
        "--kubeconfig",
        default=defaults.get("kubeconfig"),
        metavar="FILE",
        help="of another cluster than the one that runs",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=defaults.get("data_dir") or instance.default_folder(),
        metavar="DIR",
        help="as given to `evertrain up` (default: $EVERTRAIN_DATA_DIR, else ~/.evertrain/cluster)",
    )


def _selecting(parser: argparse.ArgumentParser, types: str, *, needed: bool = True) -> None:
    parser.add_argument("types", metavar="TYPE", nargs=None if needed else "?", help=types)
    parser.add_argument("names", metavar="NAME", nargs="*")
    parser.add_argument("-A", "--all-namespaces", action="store_true")
    parser.add_argument("-l", "--selector", default="", metavar="LABELS", help="for example job-name=my-job")


def _carry_out(parser: argparse.ArgumentParser, argv: Sequence[str], work: Work) -> int:
    arguments = parser.parse_args(argv)
    return running.run(parser.prog.rpartition(" ")[2], lambda: _with(arguments, work))


async def _with(arguments: argparse.Namespace, work: Work) -> int:
    from evertrain.cli import connection

    kube = connection.connect(connection.choose_kubeconfig(arguments.kubeconfig, arguments.data_dir))
    try:
        arguments.namespace = arguments.namespace or kube.namespace
        if getattr(arguments, "all_namespaces", False):
            arguments.namespace = None
        return await work(kube, arguments)
    finally:
        await kube.close()


async def _targets(kube: Connection, arguments: argparse.Namespace) -> list[tuple[Kind, list[str]]]:
    """The kinds and names that are meant; no names: all."""
    names = list(arguments.names)
    if (names or "/" in arguments.types) and (arguments.all_namespaces or arguments.selector):
        raise UsageError("names can't be given together with -A or -l")
    if "/" in arguments.types:
        found: dict[str, list[str]] = {}
        for pair in [arguments.types, *names]:
            kind, slash, name = pair.partition("/")
            if not slash or not name:
                raise UsageError(f"{pair!r} is not of the form TYPE/NAME, as the others are")
            found.setdefault(kind, []).append(name)
        return [(await kube.find_kind(kind), listed) for kind, listed in found.items()]
    kinds = [await kube.find_kind(word) for word in arguments.types.split(",") if word]
    return [(kind, names) for kind in kinds]


async def _get(kube: Connection, arguments: argparse.Namespace) -> int:
    from evertrain.cli import printing
    from evertrain.cli.connection import TABLE, path_of

    targets = await _targets(kube, arguments)
    selection = {"labelSelector": arguments.selector} if arguments.selector else {}
    shown: list[str] = []
    items = []
    for kind, names in targets:
        paths = [path_of(kind, arguments.namespace, name) for name in names or [""]]
        if arguments.output in ("", "wide"):
            answers = [await kube.ask("GET", path, selection, accept=TABLE) for path in paths]
            answer = answers[0] | {"rows": [row for each in answers for row in each.get("rows") or []]}
            if answer["rows"]:
                everywhere = arguments.all_namespaces and kind.namespaced
                header = not arguments.no_headers
                wide = arguments.output == "wide"
                shown.append(printing.table(answer, wide=wide, namespaces=everywhere, header=header))
        elif names:
            items += [await kube.ask("GET", path) for path in paths]
        else:
            items += (await kube.list(kind, arguments.namespace, labels=arguments.selector)).items
    if arguments.output == "name":
        shown = [f"{item['kind'].lower()}/{item['metadata']['name']}" for item in items]
        shown = ["\n".join(shown)] if shown else []
    elif arguments.output in ("yaml", "json"):
        one = len(items) == 1 and len(targets) == 1 and len(targets[0][1]) == 1
        whole = items[0] if one else {"apiVersion": "v1", "kind": "List", "items": items}
        shown = [(printing.as_yaml if arguments.output == "yaml" else printing.as_json)(whole).rstrip("\n")]
    if shown:
        print("\n\n".join(shown))
    else:
        where = f" in namespace {arguments.namespace}" if arguments.namespace else ""
        print(f"No resources found{where if any(kind.namespaced for kind, _ in targets) else ''}.", file=sys.stderr)
    return 0


async def _describe(kube: Connection, arguments: argparse.Namespace) -> int:
    from evertrain.cli import printing
    from evertrain.kube.port import EVENT

    texts = []
    for kind, names in await _targets(kube, arguments):
        if names:
            items = [await kube.get(kind, name, arguments.namespace) for name in names]
        else:
            items = (await kube.list(kind, arguments.namespace, labels=arguments.selector)).items
        for item in items:
            metadata = item["metadata"]
            fields = f"involvedObject.name={metadata['name']},involvedObject.kind={kind.kind}"
            namespace = metadata.get("namespace") if kind.namespaced else None
            # Not those of an earlier object of that name. A kubelet writes its node's name for the uid.
            meant = (metadata["uid"], metadata["name"] if kind.kind == "Node" else "", None)
            listed = (await kube.list(EVENT, namespace, fields=fields)).items
            events = [event for event in listed if event["involvedObject"].get("uid") in meant]
            texts.append(printing.describe(item, events, datetime.now(timezone.utc)))
    if not texts:
        print("No resources found.", file=sys.stderr)
    print("\n".join(texts), end="")
    return 0


async def _logs(kube: Connection, arguments: argparse.Namespace) -> int:
    from evertrain.kube.port import POD, ApiError

    kind, slash, name = arguments.target.rpartition("/")
    namespace = arguments.namespace
    if not slash or (await kube.find_kind(kind)).kind == "Pod":
        await _print_log(kube, await kube.get(POD, name, namespace), arguments, prefix="")
        return 0
    if (await kube.find_kind(kind)).kind != "AscendJob":
        raise UsageError(f"only pods and acjobs have logs, not {kind}")
    pods = (await kube.list(POD, namespace, labels=f"training.kubeflow.org/job-name={name}")).items
    if not pods:
        raise CommandError(f"acjob {name} has no pods in namespace {namespace}")

    async def show(pod: Object) -> int:
        """One that has no log yet doesn't keep us from the others."""
        pod_name = pod["metadata"]["name"]
        try:
            await _print_log(kube, pod, arguments, prefix=f"[{pod_name}] ")
        except ApiError as error:
            return running.complain("logs", f"pod {pod_name}: {error.message}", running.FAILED)
        return 0

    if arguments.follow:
        return max(await asyncio.gather(*map(show, pods)))
    return max([await show(pod) for pod in pods])


async def _print_log(kube: Connection, pod: Object, arguments: argparse.Namespace, prefix: str) -> None:
    from evertrain.cli.connection import path_of
    from evertrain.cli.pods import main_container
    from evertrain.kube.port import POD

    parameters = {
        "follow": "true" if arguments.follow else "",
        "tailLines": "" if arguments.tail is None else str(arguments.tail),
        "previous": "true" if arguments.previous else "",
        "container": arguments.container or main_container(pod),
        "timestamps": "true" if arguments.timestamps else "",
    }
    parameters = {key: value for key, value in parameters.items() if value}
    path = path_of(POD, arguments.namespace, pod["metadata"]["name"], "log")
    async with kube.follow(path, parameters) as pieces:
        async for line in lines(pieces):
            sys.stdout.buffer.write(prefix.encode() + line + b"\n")
            sys.stdout.flush()


async def lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Whole lines, whatever the pieces; a last one without an end, too."""
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest


async def _delete(kube: Connection, arguments: argparse.Namespace) -> int:
    from evertrain.kube.port import NotFound

    waited_for = []
    for kind, name, namespace in await _doomed(kube, arguments):
        try:
            uid = (await kube.get(kind, name, namespace))["metadata"]["uid"]
            await kube.delete(kind, name, namespace, uid=uid, grace=arguments.grace_period, policy="Foreground")
        except NotFound:
            if not arguments.ignore_not_found:
                raise
            continue
        print(f"{kind.kind.lower()} {name} deleted", flush=True)
        waited_for.append((kind, name, namespace, uid))
    if not arguments.no_wait:
        for each in waited_for:
            await gone(kube, *each)
    return 0


async def _doomed(kube: Connection, arguments: argparse.Namespace) -> list[tuple[Kind, str, str | None]]:
    from evertrain.cli import manifest

    if arguments.filename:
        if arguments.types:
            raise UsageError("either -f FILE or TYPE NAME")
        found = []
        try:
            documents = manifest.read(arguments.filename)
        except manifest.ManifestError as error:
            raise UsageError(str(error)) from None
        for document in documents:
            kind = await kube.find_kind_of(document.object)
            metadata = document.object["metadata"]
            if not metadata.get("name"):
                raise UsageError(
                    str(document.refuse("metadata.name", "is missing; what was made can't be told from it"))
                )
            found.append((kind, metadata["name"], metadata.get("namespace") or arguments.namespace))
        return found
    if not arguments.types:
        raise UsageError("what? Give TYPE NAME, or -f FILE")
    found = []
    for kind, names in await _targets(kube, arguments):
        if names:
            found += [(kind, name, arguments.namespace) for name in names]
            continue
        if not arguments.all and not arguments.selector:
            raise UsageError("which? Give names, -l LABELS or --all")
        listing = await kube.list(kind, arguments.namespace, labels=arguments.selector)
        found += [(kind, item["metadata"]["name"], item["metadata"].get("namespace")) for item in listing.items]
    return found


async def gone(kube: Connection, kind: Kind, name: str, namespace: str | None, uid: str) -> None:
    """Wait until that very object is no more."""
    from evertrain.kube.port import Gone

    fields = f"metadata.name={name}"
    try:
        async with aio.timeout(DELETE_PATIENCE):
            while True:
                listing = await kube.list(kind, namespace, fields=fields)
                if not any(item["metadata"]["uid"] == uid for item in listing.items):
                    return
                changes = kube.watch(kind, namespace, resource_version=listing.resource_version, fields=fields)
                async with contextlib.aclosing(changes):  # type: ignore[type-var]
                    with contextlib.suppress(Gone):
                        async for change in changes:
                            if change.type == "DELETED" and change.object["metadata"]["uid"] == uid:
                                return
    except TimeoutError:
        raise CommandError(f"{kind.kind.lower()} {name} is still there after {DELETE_PATIENCE:g} s") from None
