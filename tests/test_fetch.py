"""fetch.py against a real server, on this machine."""
import functools
import hashlib
import http.server
import threading

import pytest

from tinymask.fetch import fetch

GOOD = hashlib.sha256(b"12345").hexdigest()


class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        if self.headers["User-Agent"].startswith("Python-urllib"):  # what the host of WikiText-2 does
            return self.send_error(403)
        return super().do_GET()

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "x.bin").write_bytes(b"12345")
    handler = functools.partial(Handler, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_a_file_is_fetched_once(server, tmp_path):
    path = tmp_path / "data" / "x.bin"
    fetch(server + "x.bin", path, GOOD)
    assert path.read_bytes() == b"12345" and list(path.parent.iterdir()) == [path]
    path.write_bytes(b"mine")
    fetch(server + "x.bin", path, GOOD)
    assert path.read_bytes() == b"mine"


@pytest.mark.parametrize("name, checksum", [("x.bin", "0" * 64), ("nosuch.bin", GOOD)])
def test_a_bad_download_leaves_nothing(server, tmp_path, name, checksum):
    with pytest.raises(ValueError, match=f"{name}: .*by hand") as error:
        fetch(server + name, tmp_path / "data" / name, checksum)
    assert "\n" not in str(error.value) and not list((tmp_path / "data").iterdir())


def test_no_network_is_one_line(server, tmp_path):
    with pytest.raises(ValueError, match="by hand") as error:
        fetch("http://127.0.0.1:9/x.bin", tmp_path / "x.bin", GOOD)
    assert "\n" not in str(error.value) and not (tmp_path / "x.bin").exists()
