"""
Downloads, with huggingface_hub's real client, from a server on this machine.

python -m pytest tests/test_hub.py -v
"""
import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.request

import pytest
from helpers import ROOT

from files import UserError
from tasks import problems as problems_py
from tasks.problems import has_test_split, load_problems

FILES = {"config.json": b"{}", "model.safetensors": b"w" * 100_000}
ROW = b'{"question": "q", "answer": "#### 1,000"}\n'


class Server(http.server.BaseHTTPRequestHandler):
    """The models acme/NAME, whose weights break off while server.cut is set, and acme/gated; /rows of a data set."""
    protocol_version = "HTTP/1.1"

    def reply(self, status, body=b"", size=None, **headers):
        self.send_response(status)
        for name, value in {"Content_Length": size or len(body), "X_Repo_Commit": "a" * 40, **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
        self.close_connection = size is not None

    def do_GET(self):
        server, path, (*_, file) = self.server, self.path.partition("?")[0], self.path.split("/")
        if path == "/rows":
            self.reply(200, *server.rows)
        elif "acme/none" in path:
            self.reply(404, X_Error_Code="RepoNotFound")
        elif "/tree/" in path:
            self.reply(200, json.dumps([{"type": "file", "path": name, "size": len(data), "oid": name}
                                        for name, data in FILES.items()]).encode())
        elif "/revision/" in path:
            self.reply(200, json.dumps({"id": "acme/x", "sha": "a" * 40,
                                        "siblings": [{"rfilename": name} for name in FILES]}).encode())
        elif file not in FILES:
            self.reply(404, b"{}")
        elif "acme/gated" in path:
            self.reply(403, X_Error_Code="GatedRepo")
        elif server.cut and self.command == "GET" and file == "model.safetensors":
            self.reply(200, FILES[file][:50_000], len(FILES[file]), ETag='"model"')
        else:
            self.reply(200, FILES[file], ETag=f'"{file[:5]}"')

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as one:
        threading.Thread(target=one.serve_forever, args=(0.01,)).start()
        yield one
        one.shutdown()


def snapshots(server, home, *names):
    """-> the last line of each download, in a process of its own"""
    code = """
import sys, time, hub
time.sleep = lambda seconds: None                          # between the client's retries
for name in sys.argv[1:]:
    try:
        print(sorted((path.name, path.stat().st_size) for path in hub.snapshot(name, name, ["*"]).iterdir()))
    except hub.UserError as error:
        print(error)
"""
    environment = dict(HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}", HF_HOME=str(home), PYTHONPATH=str(ROOT),
                       HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_OFFLINE="")
    done = subprocess.run([sys.executable, "-c", code, *names], env=os.environ | environment, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True, cwd=home, timeout=100)
    return done.stdout.splitlines()


def test_break_off_gated_unknown_and_cached(server, tmp_path):
    server.cut = True
    cut, gated, unknown = snapshots(server, tmp_path, "acme/x", "acme/gated", "acme/none")
    assert cut.startswith("acme/x: ") and "the same command" in cut
    assert "license" in gated and "/acme/gated" in gated and "there is no" in unknown and "/acme/none" in unknown
    server.cut = False
    whole = snapshots(server, tmp_path, "acme/x")
    assert whole == [str(sorted((name, len(data)) for name, data in FILES.items()))]
    server.server_close()                                  # no network
    cached, absent = snapshots(server, tmp_path, "acme/x", "acme/y")
    assert cached == whole[0] and "cache" in absent


@pytest.mark.parametrize("body,size", [
    (ROW * 3, len(ROW) * 4), (ROW + ROW[:-2], None), (b"<html>log in</html>", None), (b'{"error": "wait"}\n', None),
    (b"", None)])
def test_gsm8k_that_is_not_whole_is_not_kept(server, tmp_path, monkeypatch, body, size):
    fetch = urllib.request.urlopen
    monkeypatch.setattr(problems_py.constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: fetch(
        f"http://127.0.0.1:{server.server_port}/rows", timeout=timeout))
    server.rows = body, size
    with pytest.raises(UserError, match="^https://raw.*test.jsonl"):
        load_problems("gsm8k", "test")
    assert not list(tmp_path.rglob("*.*"))
    server.rows = ROW * 2, None
    assert has_test_split("gsm8k") and len(load_problems("gsm8k", "test")) == 2
    server.rows = b"", None                                # the next start asks nobody
    assert [one.answer for one in load_problems("gsm8k", "test")] == ["1000"] * 2
