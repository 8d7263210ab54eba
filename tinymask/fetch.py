"""Download of one official file, with its checksum. Nothing in the package calls this unless `--download` is given."""
import contextlib
import hashlib
import http.client
import os
import urllib.request
from pathlib import Path

from tqdm import tqdm


def sha256(path):
    """Checksum of a file, in hexadecimal; read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def fetch(url, path, checksum):
    """Fetch url to path, unless there is a file. checksum: its sha256.

    It is written beside its place and moved there once the checksum is right: a path that exists is whole.
    Raises ValueError, one line with the address, if it cannot be had.
    """
    path = Path(path)
    if path.exists():
        return
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        request = urllib.request.Request(url, headers={"User-Agent": "tinymask"})  # some hosts refuse Python's own
        with urllib.request.urlopen(request, timeout=60) as source, open(part, "wb") as file:
            size = int(source.headers.get("Content-Length") or 0) or None
            with tqdm(total=size, unit="B", unit_scale=True, desc=path.name, disable=None) as bar:
                while block := source.read(2**20):
                    file.write(block)
                    bar.update(len(block))
        if (found := sha256(part)) != checksum:
            raise ValueError(f"{part.stat().st_size:,} bytes came, of sha256 {found}, wanted {checksum}")
        os.replace(part, path)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{url}: {reason}; put the file into {path.parent} by hand, or try again") from None
    finally:
        with contextlib.suppress(OSError):  # the folder cannot be written to: that was said
            part.unlink(missing_ok=True)
