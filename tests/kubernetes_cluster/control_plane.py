"""etcd, the API server, the controller manager and the scheduler, as processes on the bridge's address."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path

import yaml
from cryptography.hazmat.primitives import serialization

from tests.certificates import Authority, new_key
from tests.kube_http import Client
from tests.kubernetes_cluster.components import Components
from tests.kubernetes_cluster.network import HERE, PODS, SERVICES
from tests.kubernetes_cluster.processes import Daemon

URL = f"https://{HERE}:6443"
ADMINISTRATOR, OPERATOR = "administrator", "operator"
"""Both may do everything; what the second one asks for is on record where there are no nodes."""
MANAGER, SCHEDULER, PROXY = "system:kube-controller-manager", "system:kube-scheduler", "system:kube-proxy"


class ControlPlane:
    def __init__(self, components: Components, folder: Path, nodes: list[str], *, node_grace: float) -> None:
        """`node_grace`: seconds without a heartbeat after which a node is not ready. Without nodes, those that somebody
        makes up are always ready."""
        self._components, self.folder = components, folder
        folder.mkdir()
        self._users = {user: "system:masters" for user in (ADMINISTRATOR, OPERATOR)}
        self._users |= {user: "" for user in (MANAGER, SCHEDULER, PROXY)}
        self._users |= {f"system:node:{node}": "system:nodes" for node in nodes}
        self._tokens = {user: secrets.token_hex(16) for user in self._users}
        self._write_credentials()
        self.etcd = self._daemon(
            "etcd", "--data-dir", folder / "etcd", "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379", "--listen-peer-urls=http://127.0.0.1:2380",
            "--unsafe-no-fsync",
        )  # fmt: skip
        self.api = self._daemon(
            "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", f"--advertise-address={HERE}",
            f"--bind-address={HERE}", f"--service-cluster-ip-range={SERVICES}.0.0/16",
            f"--tls-cert-file={folder / 'api.crt'}", f"--tls-private-key-file={folder / 'api.key'}",
            f"--token-auth-file={folder / 'tokens.csv'}", "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--service-account-key-file={folder / 'accounts.pub'}",
            f"--service-account-signing-key-file={folder / 'accounts.key'}",
            "--service-account-issuer=https://kubernetes.default.svc", "--allow-privileged",
            "--kubelet-preferred-address-types=InternalIP",
            "--etcd-compaction-interval=30s",  # what is long gone is so within a minute, for those who ask for it
            *([] if nodes else [f"--audit-log-path={folder / 'requests.log'}", f"--audit-policy-file={self._audit()}"]),
        )  # fmt: skip
        self.manager = self._daemon(
            "kube-controller-manager", f"--kubeconfig={self.kubeconfig(MANAGER)}", "--use-service-account-credentials",
            f"--service-account-private-key-file={folder / 'accounts.key'}", f"--root-ca-file={folder / 'ca.crt'}",
            f"--cluster-cidr={PODS}.0.0/16", f"--node-monitor-grace-period={node_grace:g}s", "--node-monitor-period=1s",
            "--leader-elect=false", f"--cert-dir={folder}", f"--controllers=*{'' if nodes else ',-nodelifecycle'}",
        )  # fmt: skip
        self.scheduler = self._daemon(
            "kube-scheduler", f"--kubeconfig={self.kubeconfig(SCHEDULER)}", f"--cert-dir={folder}",
            "--leader-elect=false",
        )  # fmt: skip

    def _daemon(self, name: str, *options: str | Path) -> Daemon:
        program = name if name == "etcd" else self._components.program(name)
        return Daemon([program, *options], self.folder / f"{name}.log", self._components.environment())

    def _audit(self) -> Path:
        """What the operator asks for, and nothing else."""
        file = self.folder / "audit.json"
        rules = [{"level": "Metadata", "users": [OPERATOR]}, {"level": "None"}]
        stages = ["RequestReceived", "ResponseStarted"]
        policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": rules, "omitStages": stages}
        file.write_text(json.dumps(policy))
        return file

    def _write_credentials(self) -> None:
        authority = Authority(self.folder)
        served = authority.issue("api", hosts=["kubernetes", "kubernetes.default.svc", HERE, f"{SERVICES}.0.1"])
        Path(served.cert).rename(self.folder / "api.crt")
        Path(served.key).rename(self.folder / "api.key")
        Path(served.ca).rename(self.folder / "ca.crt")
        accounts = new_key("rsa2048")
        (self.folder / "accounts.key").write_bytes(
            accounts.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        (self.folder / "accounts.pub").write_bytes(
            accounts.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
        lines = [f'{token},{user},{user},"{self._users[user]}"\n' for user, token in self._tokens.items()]
        (self.folder / "tokens.csv").write_text("".join(lines))

    def kubeconfig(self, user: str) -> Path:
        file = self.folder / f"kubeconfig-{user.replace(':', '-')}"
        named = {"name": "kubernetes"}
        cluster = {"server": URL, "certificate-authority": str(self.folder / "ca.crt")}
        content = {
            "apiVersion": "v1", "kind": "Config", "current-context": "kubernetes",
            "clusters": [{**named, "cluster": cluster}],
            "users": [{**named, "user": {"token": self._tokens[user]}}],
            "contexts": [{**named, "context": {"cluster": "kubernetes", "user": "kubernetes"}}],
        }  # fmt: skip
        file.write_text(yaml.safe_dump(content))
        return file

    def access(self) -> tuple[str, str, str]:
        """Address, token and authority, for an administrator."""
        return URL, self._tokens[ADMINISTRATOR], str(self.folder / "ca.crt")

    def client(self) -> Client:
        return Client(*self.access())

    def start(self) -> None:
        self.etcd.start()
        self.start_api()
        self.manager.start()
        self.scheduler.start()

    def start_api(self) -> None:
        self.api.start()
        self.api.until(self._ready, "being ready")

    def _ready(self) -> bool:
        client = self.client()
        try:
            return client.get("/readyz").code == 200
        except OSError:
            return False
        finally:
            client.close()

    def restart_api(self, pause: float = 0.0) -> None:
        """Killed, and back after some seconds."""
        self.api.kill()
        time.sleep(pause)
        self.start_api()

    def end(self) -> None:
        for daemon in (self.scheduler, self.manager, self.api, self.etcd):
            if hasattr(daemon, "process"):
                daemon.kill()
