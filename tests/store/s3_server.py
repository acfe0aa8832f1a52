"""An S3 server on a free port of 127.0.0.1, which it prints; one request at a time.

moto looks for an object and puts it in two steps: of two conditional puts at once, both may win, as 3 of 60
races of 6 did. A real S3 lets one win, and the commits of a store depend on that.

Below a prefix with `lost-answers` in it the first put of each entry of the log is carried out and answered
503, as a real S3 may do: the client tries again and meets its own entry.
"""

import threading
from collections.abc import Iterable
from io import BytesIO
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


class OneAtATime:
    def __init__(self) -> None:
        self.app = DomainDispatcherApplication(create_backend_app)
        self.lock = threading.Lock()
        self.lost: set[str] = set()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        length = environ.get("CONTENT_LENGTH")
        if length:  # a client that is killed while it sends must not hold the lock
            environ["wsgi.input"] = BytesIO(environ["wsgi.input"].read(int(length)))
        path = environ["PATH_INFO"]
        with self.lock:
            put = environ["REQUEST_METHOD"] == "PUT" and path.endswith(".json")
            if put and "lost-answers" in path and path not in self.lost:
                self.lost.add(path)
                list(self.app(environ, lambda *_: None))
                start_response("503 Slow Down", [("Content-Length", "0")])
                return []
            return list(self.app(environ, start_response))


if __name__ == "__main__":
    server = make_server("127.0.0.1", 0, OneAtATime(), threaded=True)
    print(server.port, flush=True)
    server.serve_forever()
