"""Files that hold keys and passwords, and that no job is sent by accident: what a working folder may have lying about.

They are left out unless a line such as ``!.env`` of a ``.gitignore`` or ``.gpuctlignore`` asks for them.
"""

from __future__ import annotations

from pathlib import Path

from gpuctl.cluster.jobs.gitignore import Rules, rules

LINES = """
.ssh/
.gnupg/
.aws/
.azure/
.kube/
**/.config/gcloud/
**/.config/gh/
**/.docker/config.json
**/.cache/huggingface/token
**/.config/huggingface/token
**/.huggingface/token
.netrc
_netrc
.pgpass
.pypirc
.npmrc
.git-credentials
.boto
.s3cfg
.env
.env.*
!.env.example
!.env.sample
!.env.template
*.pem
*.key
*.p12
*.pfx
*.ppk
id_rsa
id_dsa
id_ecdsa
id_ecdsa_sk
id_ed25519
id_ed25519_sk
credentials.json
application_default_credentials.json
service_account.json
"""
"""As in a .gitignore. Public keys and examples are no secrets."""

_AT_HOME = (".ssh", ".gnupg", ".aws", ".azure", ".kube", ".config/gcloud", ".netrc", ".local/state/gpuctl")


def secrets_in(root: Path) -> Rules:
    """What is left out anywhere below ``root``."""
    return rules(root, LINES)


def of_home(folder: Path) -> str | None:
    """What of the user's home folder is in ``folder``, if that is home itself, one above, or one that holds the keys of
    some tool; ``None`` for any other. ``folder`` is resolved."""
    try:
        home = Path.home().resolve()
    except RuntimeError:  # a user without one
        return None
    if folder == home or folder in home.parents:
        return "your home folder" if folder != home else "everything in your home"
    found = (home / name for name in _AT_HOME)
    return next((str(path) for path in found if path.is_relative_to(folder) and path.exists()), None)
