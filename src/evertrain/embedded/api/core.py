"""The requests of the Kubernetes API, without HTTP.

Each one runs to its end without waiting for anything, so what it reads is still true when it writes. The HTTP server
and the clients inside this process are thin shells around it.
"""

from __future__ import annotations

import logging
import secrets
import uuid
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from ipaddress import IPv4Network
from typing import Any

from evertrain.embedded.api import admission
from evertrain.embedded.api.deletion import DeleteOptions, finishable, marked
from evertrain.embedded.api.envelope import bound, check_envelope, check_preconditions
from evertrain.embedded.api.listing import (
    ListOptions,
    Page,
    matcher,
    page,
    parse_version,
    quick_matcher,
    shown,
    storage_of,
)
from evertrain.embedded.api.services import ADDRESSES, allocate, has_addresses_of
from evertrain.embedded.api.status import already_exists, changed, conflict, forbidden, not_found
from evertrain.embedded.api.watching import Watch
from evertrain.embedded.network.plan import LOOPBACK
from evertrain.embedded.schema import (
    FieldError,
    Refused,
    Registry,
    Resource,
    applied,
    bad_request,
    converted,
    invalid_object,
    patched,
    prepare_create,
    prepare_update,
    tracked,
)
from evertrain.embedded.store import Changed, Exists, Record, Store
from evertrain.kube.port import Object

logger = logging.getLogger(__name__)

APPLY = "application/apply-patch+yaml"
NAMESPACES, PODS, DEFINITIONS = "/namespaces", "/pods", "apiextensions.k8s.io/customresourcedefinitions"
_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"
_MAX_NAME_BASE = 58
_MANAGED = frozenset({"managedFields"})


@dataclass(frozen=True)
class WriteOptions:
    manager: str = "unknown"
    dry_run: bool = False
    validation: str = "Warn"
    """fieldValidation: Ignore, Warn or Strict."""
    force: bool = False
    duplicates: tuple[str, ...] = ()
    """Fields that the body had twice."""


DEFAULTS = WriteOptions()
PLAIN_DELETE = DeleteOptions()
_IMMORTAL = ("default", "kube-system", "kube-public", "kube-node-lease")
"""The last one can be deleted on Kubernetes, where somebody makes it again. Nodes without it are taken for lost."""


@dataclass(frozen=True)
class Written:
    object: Object
    """The writer's own."""
    created: bool = False
    deleted: bool = False
    warnings: tuple[str, ...] = ()


def utc_now() -> datetime:
    return datetime.now(timezone.utc)


class Api:
    """Raises Refused from every method."""

    def __init__(
        self,
        store: Store,
        registry: Registry,
        *,
        now: Callable[[], datetime] = utc_now,
        services: IPv4Network = LOOPBACK.services,
    ) -> None:
        """`services`: the addresses that Services get."""
        self.store = store
        self.registry = registry
        self.now = now
        self._services = services
        self._watches: set[Watch] = set()
        for record in store.records(DEFINITIONS):
            self._define(record)
        self._readdress()

    def _readdress(self) -> None:
        """Services of a cluster that had other addresses; nobody who was told of these runs any more."""
        resource = self.registry.find("", "v1", "services")
        assert resource is not None
        found = list(self.store.records(storage_of(resource)))
        good = [record.object for record in found if has_addresses_of(record.object, self._services)]
        for record in found:
            if not has_addresses_of(record.object, self._services):
                spec = {key: value for key, value in record.object["spec"].items() if key not in ADDRESSES}
                item = {**record.object, "spec": spec}
                allocate(item, good, within=self._services)
                good.append(self._store(resource, record, item, dry_run=False).object)

    def close(self) -> None:
        """Ends all watches."""
        for watch in list(self._watches):
            watch.close()

    # Reading

    def record(self, resource: Resource, namespace: str, name: str) -> Record:
        record = self.store.get(storage_of(resource), namespace, name)
        if record is None:
            raise not_found(resource, name)
        return record

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """To be read only."""
        return shown(resource, self.record(resource, namespace, name))

    def page(self, resource: Resource, namespace: str | None, options: ListOptions) -> Page:
        return page(self.store, resource, namespace, options)

    def watch(
        self,
        resource: Resource,
        namespace: str | None,
        *,
        labels: str = "",
        fields: str = "",
        version: str = "",
        bookmarks: bool = False,
        send_initial: bool | None = None,
    ) -> Watch:
        start = None if version in ("", "0") or send_initial else parse_version(version)
        if send_initial is False and start is None:
            start = self.store.version
        watch = Watch(
            self.store,
            resource,
            namespace,
            matcher(resource, labels, fields),
            version=start,
            quick=quick_matcher(resource, fields),
            bookmarks=bookmarks,
            initial_end=bool(send_initial) and bookmarks,
        )
        self._watches.add(watch)
        watch.on_close(self._watches.discard)
        return watch

    # Writing

    def create(self, resource: Resource, namespace: str, item: Any, options: WriteOptions = DEFAULTS) -> Written:
        """`item` is this method's own from now on."""
        item = check_envelope(resource, namespace, "", item)
        metadata = item["metadata"]
        if metadata.get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        generated = not metadata.get("name") and bool(metadata.get("generateName"))
        if generated:
            self._generate_name(resource, namespace, metadata)
        for key in ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "selfLink"):
            metadata.pop(key, None)
        return self._create(resource, namespace, item, options, track=True)

    def _create(
        self, resource: Resource, namespace: str, item: Object, options: WriteOptions, *, track: bool
    ) -> Written:
        self._check_namespace(resource, namespace, item)
        if resource.custom:
            definition = self.store.get(DEFINITIONS, "", resource.qualified)
            if definition is not None and definition.object["metadata"].get("deletionTimestamp"):
                why = "create not allowed while custom resource definition is terminating"
                raise Refused(405, "MethodNotAllowed", why, {"group": resource.group, "kind": resource.plural})
        prepared = prepare_create(resource, item, field_validation=options.validation, duplicates=options.duplicates)
        item = prepared.object
        _drop_empty(item["metadata"])
        name, moment = item["metadata"]["name"], self.now()
        siblings = self._siblings(resource, namespace, name)
        errors = admission.before_create(self.registry, resource, item, siblings, _text(moment), self._services)
        if errors:
            raise invalid_object(resource.group, resource.kind, name, errors)
        item["metadata"]["uid"] = str(uuid.uuid4())
        item["metadata"]["creationTimestamp"] = _text(moment)
        storage = storage_of(resource)
        if self.store.get(storage, namespace, name) is not None:
            raise already_exists(resource, name)
        if track:
            item = tracked(resource, None, item, manager=options.manager, now=moment)
        if not options.dry_run:
            try:
                record = self.store.create(storage, namespace, name, item)
            except Exists:
                raise already_exists(resource, name) from None
            self._written(storage, record)
        return Written(item, created=True, warnings=tuple(prepared.warnings))

    def update(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        item: Any,
        options: WriteOptions = DEFAULTS,
        *,
        subresource: str = "",
    ) -> Written:
        item = check_envelope(resource, namespace, name, item)
        record = self.record(resource, namespace, name)
        version = item["metadata"].get("resourceVersion")
        if not version and resource.custom:
            error = FieldError(
                "metadata.resourceVersion", "FieldValueInvalid", "Invalid value: 0x0: must be specified for an update"
            )
            raise invalid_object(resource.group, resource.kind, name, [error])
        return self._update(resource, record, item, options, subresource=subresource, track=True)

    def patch(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Any,
        content_type: str,
        options: WriteOptions = DEFAULTS,
        *,
        subresource: str = "",
    ) -> Written:
        record = self.store.get(storage_of(resource), namespace, name)
        if content_type == APPLY:
            return self._apply(resource, namespace, name, record, body, options, subresource)
        if record is None:
            raise not_found(resource, name)
        old = self.own(resource, record)
        item = patched(resource, old, body, content_type)
        item = check_envelope(resource, namespace, name, item)
        return self._update(resource, record, item, options, subresource=subresource, track=True)

    def _apply(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        record: Record | None,
        body: Any,
        options: WriteOptions,
        subresource: str,
    ) -> Written:
        body = check_envelope(resource, namespace, name, body)
        body["metadata"]["name"] = name
        old = None if record is None else self.own(resource, record)
        if old is None and subresource:
            raise not_found(resource, name)
        if old is None and body["metadata"].get("uid"):
            raise conflict(resource, name, f"uid mismatch: the provided object specified uid {body['metadata']['uid']}")
        if body["metadata"].get("managedFields"):
            raise bad_request("metadata.managedFields must be nil")
        if record is not None:
            check_preconditions(resource, record, body["metadata"])
        item = applied(
            resource,
            old,
            body,
            manager=options.manager,
            now=self.now(),
            force=options.force,
            subresource=subresource,
        )
        if record is None:
            return self._create(resource, namespace, item, options, track=False)
        return self._update(resource, record, item, options, subresource=subresource, track=False)

    def _update(
        self,
        resource: Resource,
        record: Record,
        item: Object,
        options: WriteOptions,
        *,
        subresource: str,
        track: bool,
    ) -> Written:
        check_preconditions(resource, record, item["metadata"])
        old = shown(resource, record)
        before = old
        sent, kept = item["metadata"].pop("managedFields", None), old["metadata"].get("managedFields")
        if sent and (sent != kept or not track):
            item["metadata"]["managedFields"] = sent
        elif kept:
            # They are long, and the writer left them as they are: no need to read and check them.
            before = {**old, "metadata": {k: v for k, v in old["metadata"].items() if k != "managedFields"}}
        prepared = prepare_update(
            resource,
            item,
            before,
            subresource=subresource,
            field_validation=options.validation,
            duplicates=options.duplicates,
        )
        new, moment = prepared.object, self.now()
        _drop_empty(new["metadata"])
        if not subresource:
            siblings = self._siblings(resource, record.namespace, record.name)
            errors = admission.before_update(self.registry, resource, new, old, siblings, _text(moment), self._services)
            if errors:
                raise invalid_object(resource.group, resource.kind, record.name, errors)
        new["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
        warnings = tuple(prepared.warnings)
        # kubectl hands its fields to another manager by a patch that changes nothing else.
        handed_over = not track or "managedFields" in new["metadata"]
        if _same(new, old, managed=handed_over):
            return Written(self.own(resource, record), warnings=warnings)
        if track:
            new = _tracked(resource, old, new, options.manager, moment, subresource)
        return replace(self._store(resource, record, new, options.dry_run), warnings=warnings)

    def _store(self, resource: Resource, record: Record, item: Object, dry_run: bool) -> Written:
        """Writes the next state of an object; one that only waited for its last finalizer is gone then."""
        gone = finishable(item) and (resource.group, resource.kind) != ("", "Namespace")
        if dry_run:
            return Written(item, deleted=gone)
        storage = storage_of(resource)
        try:
            if gone:
                last = self.store.delete(storage, record.namespace, record.name, record.version)
                item["metadata"]["resourceVersion"] = str(last.version)
                self._removed(storage, record.name)
            else:
                self._written(storage, self.store.update(storage, record.namespace, record.name, item, record.version))
        except Changed:
            raise changed(resource, record.name) from None
        return Written(item, deleted=gone)

    def delete(self, resource: Resource, namespace: str, name: str, options: DeleteOptions = PLAIN_DELETE) -> Written:
        record = self.record(resource, namespace, name)
        check_preconditions(resource, record, {"uid": options.uid, "resourceVersion": options.version})
        if (resource.group, resource.kind) == ("", "Namespace"):
            return self._delete_namespace(resource, record, options)
        before = self.own(resource, record)
        item = marked(resource, self.own(resource, record), options, self.now())
        storage = storage_of(resource)
        if item is None:
            if not options.dry_run:
                last = self.store.delete(storage, namespace, name, record.version)
                before["metadata"]["resourceVersion"] = str(last.version)
                self._removed(storage, name)
            return Written(before, deleted=True)
        if item == before or options.dry_run:
            return Written(item)
        return self._store(resource, record, item, False)

    def _delete_namespace(self, resource: Resource, record: Record, options: DeleteOptions) -> Written:
        """The first request marks it; it goes by a later one, when nothing is left in it."""
        if record.name in _IMMORTAL:
            raise forbidden(resource, record.name, "this namespace may not be deleted")
        item = record.copy()
        if options.dry_run:
            return Written(item)
        if not item["metadata"].get("deletionTimestamp"):
            item["metadata"]["deletionTimestamp"] = _text(self.now())
            item["metadata"]["deletionGracePeriodSeconds"] = 0
            item.setdefault("status", {})["phase"] = "Terminating"
            self.store.update(NAMESPACES, "", record.name, item, record.version)
            return Written(item)
        if self.store.resources_in(record.name) or item["metadata"].get("finalizers"):
            raise conflict(
                resource,
                record.name,
                "The system is ensuring all content is removed from this namespace.  Upon completion, this namespace "
                "will automatically be purged by the system.",
            )
        self.store.delete(NAMESPACES, "", record.name, record.version)
        return Written(item, deleted=True)

    def finalize_namespace(self, resource: Resource, name: str, item: Any, options: WriteOptions) -> Written:
        """PUT namespaces/NAME/finalize: somebody has finished, or still holds on to it."""
        item = check_envelope(resource, "", name, item)
        record = self.record(resource, "", name)
        check_preconditions(resource, record, item["metadata"])
        new = record.copy()
        spec = item.get("spec")
        finalizers = (spec.get("finalizers") if isinstance(spec, dict) else None) or []
        if not isinstance(finalizers, list) or not all(isinstance(text, str) and text for text in finalizers):
            raise bad_request("spec.finalizers must be a list of strings")
        new.setdefault("spec", {})["finalizers"] = finalizers
        if options.dry_run:
            return Written(new)
        if not new["spec"]["finalizers"] and finishable(new) and not self.store.resources_in(name):
            self.store.delete(NAMESPACES, "", name, record.version)
            return Written(new, deleted=True)
        self.store.update(NAMESPACES, "", name, new, record.version)
        return Written(new)

    def delete_collection(
        self, resource: Resource, namespace: str | None, selection: ListOptions, options: DeleteOptions
    ) -> list[Object]:
        found = page(self.store, resource, namespace, selection).records
        return [self.delete(resource, record.namespace, record.name, options).object for record in found]

    def bind(self, resource: Resource, namespace: str, name: str, binding: Any, dry_run: bool = False) -> None:
        """POST pods/NAME/binding."""
        target = binding.get("target") if isinstance(binding, dict) else None
        node = target.get("name") if isinstance(target, dict) else None
        if not isinstance(node, str) or not node:
            error = FieldError("target.name", "FieldValueRequired", "Required value")
            raise invalid_object("", "Binding", name, [error])
        record = self.record(resource, namespace, name)
        given = binding.get("metadata") if isinstance(binding.get("metadata"), dict) else {}
        check_preconditions(resource, record, {"uid": given.get("uid")})
        pod = bound(resource, record.copy(), node, given.get("annotations"), _text(self.now()))
        if not dry_run:
            self.store.update(PODS, namespace, name, pod, record.version)

    # Helpers

    def own(self, resource: Resource, record: Record) -> Object:
        """The caller's own copy, as this version of the kind shows it."""
        item = record.copy()
        return item if item.get("apiVersion") == resource.api_version else converted(item, resource)

    def _written(self, storage: str, record: Record) -> None:
        if storage == DEFINITIONS:
            self._define(record)

    def _define(self, record: Record) -> None:
        """A definition that was found valid and yet can't be served is a defect; it must not keep the server down."""
        try:
            self.registry.add_definition(record.copy())
        except Exception:
            logger.exception("the definition %s can't be served", record.name)

    def _removed(self, storage: str, name: str) -> None:
        if storage == DEFINITIONS:
            self.registry.remove_definition(name)

    def _siblings(self, resource: Resource, namespace: str, name: str) -> Iterator[Object]:
        """The other objects of the kind, where admission looks at them."""
        if not admission.needs_siblings(resource):
            return
        for record in self.store.records(storage_of(resource)):
            if (record.namespace, record.name) != (namespace, name):
                yield record.object

    def _generate_name(self, resource: Resource, namespace: str, metadata: Object) -> None:
        base = metadata["generateName"][:_MAX_NAME_BASE]
        storage = storage_of(resource)
        for _ in range(100):
            metadata["name"] = base + "".join(secrets.choice(_SUFFIX) for _ in range(5))
            if self.store.get(storage, namespace, metadata["name"]) is None:
                return
        raise already_exists(resource, metadata["name"])

    def _check_namespace(self, resource: Resource, namespace: str, item: Object) -> None:
        if not resource.namespaced:
            return
        record = self.store.get(NAMESPACES, "", namespace)
        if record is None:
            about = {"name": namespace, "kind": "namespaces"}
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found', about)
        if record.object["metadata"].get("deletionTimestamp"):
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            cause = FieldError(
                "metadata.namespace", "NamespaceTerminating", f"namespace {namespace} is being terminated"
            )
            raise forbidden(resource, str(item["metadata"].get("name", "")), why, [cause])


def _drop_empty(metadata: Object) -> None:
    """Empty is the same as not there; kubectl sends it, and nothing has changed then."""
    for key in ("labels", "annotations", "finalizers", "ownerReferences"):
        if key in metadata and not metadata[key]:
            del metadata[key]


def _part(item: Object, keys: Container[str]) -> Object:
    return {key: value for key, value in item.items() if key in keys}


def _tracked(resource: Resource, old: Object, new: Object, manager: str, now: datetime, subresource: str) -> Object:
    """Who manages what can only change in the parts that did."""
    parts = {key for key in (*old, *new) if key != "metadata" and old.get(key) != new.get(key)} | {"apiVersion", "kind"}
    before, after = old["metadata"], new["metadata"]
    differ = {key for key in (*before, *after) if before.get(key) != after.get(key)} | _MANAGED
    before, after = _part(before, differ), _part(after, differ)
    managed = tracked(
        resource,
        {**_part(old, parts), "metadata": before},
        {**_part(new, parts), "metadata": after},
        manager=manager,
        now=now,
        subresource=subresource,
    )["metadata"]
    metadata = {key: value for key, value in new["metadata"].items() if key != "managedFields"}
    return {**new, "metadata": metadata | _part(managed, _MANAGED)}


def _same(new: Object, old: Object, *, managed: bool) -> bool:
    if managed:
        return new == old
    for key in new.keys() | old.keys():
        if key != "metadata" and new.get(key) != old.get(key):
            return False
    mine, theirs = dict(new["metadata"]), dict(old["metadata"])
    mine.pop("managedFields", None)
    theirs.pop("managedFields", None)
    return mine == theirs


def _text(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
