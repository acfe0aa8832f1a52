"""An S3 server on a free port of 127.0.0.1, which it prints; one request at a time.

moto looks for an object and puts it in two steps: of two conditional puts at once, both may win, as 3 of 60
races of 6 did. A real S3 lets one win, and the commits of a store depend on that.
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

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        length = environ.get("CONTENT_LENGTH")
        if length:  # a client that is killed while it sends must not hold the lock
            environ["wsgi.input"] = BytesIO(environ["wsgi.input"].read(int(length)))
        with self.lock:
            return list(self.app(environ, start_response))


if __name__ == "__main__":
    server = make_server("127.0.0.1", 0, OneAtATime(), threaded=True)
    print(server.port, flush=True)
    server.serve_forever()
