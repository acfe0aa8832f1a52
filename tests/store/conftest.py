"""A real S3 server on 127.0.0.1, started once for the tests that ask for it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from trajstore.store.place import ANSWER_SECONDS


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, str]]:
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("s3_server.py"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        options = {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        }
        s3 = pafs.S3FileSystem(
            access_key="test",
            secret_key="test",
            region="us-east-1",
            scheme="http",
            endpoint_override=f"127.0.0.1:{port}",
            allow_bucket_creation=True,
            connect_timeout=ANSWER_SECONDS,
            request_timeout=ANSWER_SECONDS,
        )
        s3.create_dir("bucket")
        yield options
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
