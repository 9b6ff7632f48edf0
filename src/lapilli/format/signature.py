"""Signatures of programs: a SHA-256 digest of the file and an Ed25519 signature of it, at the end of the data section.

The section has 192 bytes, at a multiple of 64, and is the last of the file. Nothing refers to it, so every player loads a signed
file like any other. All numbers are little-endian:

    0   "LAPISIG\\0"        8   version: 1     12   algorithm: 1 (Ed25519 over SHA-256)
    16  digest, 32 bytes   48  public key, 32 bytes   80  signature, 64 bytes   144 zeros

The digest is over the header (with a checksum of zero), all bytes before the section, and its first 16 bytes. The signature is over
the context below and the digest. The checksum of the header is computed after the section is added, as for any file.

All but the digest needs the package cryptography (the extra `sign`).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from lapilli.errors import InvalidInputError, LapilliError, SignatureError
from lapilli.format import container

SIZE = 192
_MAGIC = b"LAPISIG\0"
_PREFIX = _MAGIC + struct.pack("<II", 1, 1)
_CONTEXT = b"lapilli program signature 1\n"
_KEY_SIZE, _SIGNATURE_SIZE = 32, 64

Key = str | os.PathLike[str] | bytes
"""A public key: the path of a PEM file, its content, or the 32 bytes themselves."""


@dataclass(frozen=True)
class Signature:
    """The signature of a file: its digest, the public key that the signer names, and the signature."""

    digest: bytes
    public_key: bytes
    signature: bytes

    @property
    def fingerprint(self) -> str:
        """The first 16 bytes of the key's SHA-256, by which users tell keys apart."""
        return fingerprint(self.public_key)


def fingerprint(public_key: bytes) -> str:
    """The fingerprint of a public key."""
    return hashlib.sha256(public_key).hexdigest()[:32]


def of(data: bytes) -> Signature | None:
    """The signature in a file, unverified; None if there is none. Raises SignatureError if it is damaged."""
    header = container.read_header(data)
    begin = len(data) - SIZE
    if header.data_size < SIZE or begin % container.ALIGNMENT or data[begin : begin + len(_MAGIC)] != _MAGIC:
        return None
    section = data[begin:]
    if section[:16] != _PREFIX or any(section[144:]):
        raise SignatureError("The file has a signature of another version; use the version of Lapilli that signed it.")
    return Signature(section[16:48], section[48:80], section[80:144])


def check_digest(data: bytes) -> Signature:
    """Checks that a file is unchanged since it was signed, whatever the key. Raises SignatureError if it was changed, or is not
    signed."""
    found = of(data)
    if found is None:
        raise SignatureError("The file is not signed.")
    if not hmac.compare_digest(_digest(data), found.digest):
        raise SignatureError("The file was changed after it was signed: its SHA-256 does not match.")
    return found


def verify(data: bytes, key: Key) -> Signature:
    """Checks that a file is unchanged since the owner of a key signed it. Raises SignatureError if not."""
    public = public_key(key)
    found = check_digest(data)
    if not hmac.compare_digest(found.public_key, public):
        raise SignatureError(
            f"The file was signed with another key: {found.fingerprint}, and not {fingerprint(public)}. Ask its maker."
        )
    ed25519 = _cryptography("hazmat.primitives.asymmetric.ed25519")
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(public).verify(found.signature, _CONTEXT + found.digest)
    except _cryptography("exceptions").InvalidSignature:
        raise SignatureError("The signature of the file was not made with its key.") from None
    return found


def sign(data: bytes, private_key: Any) -> bytes:
    """The file with a signature, which replaces any earlier one. private_key: as returned by `private_key`."""
    header = container.read_header(data)
    end = len(data) - (SIZE if of(data) is not None else 0)
    body = data[container.HEADER_SIZE : end]
    body += bytes(container.aligned(end) - end)
    public = private_key.public_key().public_bytes_raw()
    sizes = (header.structure_offset, header.structure_size, header.data_offset,
             container.HEADER_SIZE + len(body) + SIZE - header.data_offset)  # fmt: skip
    digest = hashlib.sha256(container.pack_header(sizes, 0) + body + _PREFIX).digest()
    section = _PREFIX + digest + public + private_key.sign(_CONTEXT + digest)
    return container.from_body(sizes, body + section + bytes(SIZE - len(section)))


def _digest(data: bytes) -> bytes:
    header = container.read_header(data)
    sizes = (header.structure_offset, header.structure_size, header.data_offset, header.data_size)
    made = hashlib.sha256(container.pack_header(sizes, 0))
    with memoryview(data) as view:
        made.update(view[container.HEADER_SIZE : len(data) - SIZE])
        made.update(view[len(data) - SIZE : len(data) - SIZE + len(_PREFIX)])
    return made.digest()


# -- keys


def generate(path: Path, password: bytes | None = None) -> str:
    """Writes a new private key to a file, which must not exist and which only this user can read, and its public key to the
    file with `.pub` added. Returns the fingerprint. Raises OSError."""
    ed25519 = _cryptography("hazmat.primitives.asymmetric.ed25519")
    forms = _cryptography("hazmat.primitives.serialization")
    private = ed25519.Ed25519PrivateKey.generate()
    lock = forms.NoEncryption() if password is None else forms.BestAvailableEncryption(password)
    secret = private.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, lock)
    public = private.public_key().public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
    for file, content, mode in ((path, secret, 0o600), (path.with_name(path.name + ".pub"), public, 0o644)):
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), mode)
        with os.fdopen(handle, "wb") as opened:
            opened.write(content)
    return fingerprint(private.public_key().public_bytes_raw())


def private_key(path: Path, password: bytes | None = None) -> Any:
    """The private key in a PEM file. Raises PasswordNeeded; InvalidInputError if it is not an Ed25519 key; OSError."""
    forms = _cryptography("hazmat.primitives.serialization")
    ed25519 = _cryptography("hazmat.primitives.asymmetric.ed25519")
    try:
        key = forms.load_pem_private_key(path.read_bytes(), password)
    except TypeError:
        raise PasswordNeeded(f"{path} is locked with a password.") from None
    except Exception as error:  # of several kinds, by the version
        raise InvalidInputError(f"{path} cannot be read as a private key: {error}") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise InvalidInputError(f"{path} is no Ed25519 key; make one with `lapilli keygen`.")
    return key


class PasswordNeeded(InvalidInputError):
    """A private key is encrypted, and no password was given."""


def public_key(key: Key) -> bytes:
    """The 32 bytes of a public key. Raises InvalidInputError if it is not one, and OSError."""
    if isinstance(key, bytes) and len(key) == _KEY_SIZE:
        return key
    content = key if isinstance(key, bytes) else Path(key).read_bytes()
    forms = _cryptography("hazmat.primitives.serialization")
    ed25519 = _cryptography("hazmat.primitives.asymmetric.ed25519")
    try:
        found = forms.load_pem_public_key(content)
    except Exception as error:
        raise InvalidInputError(
            f"The public key cannot be read (a PEM file, as `lapilli keygen` writes it): {error}"
        ) from error
    if not isinstance(found, ed25519.Ed25519PublicKey):
        raise InvalidInputError("The public key is no Ed25519 key.")
    return bytes(found.public_bytes_raw())


def _cryptography(module: str) -> Any:
    try:
        return import_module(f"cryptography.{module}")
    except ImportError as error:
        raise LapilliError("Signatures need the package cryptography: pip install 'lapilli[sign]'.") from error
