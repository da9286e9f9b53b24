"""The built-in page: files in this package, sent with headers that let the page load and reach nothing but
this worker.

Input: a path. Output: the file. The page holds nothing of the model or its users, so it is sent without a
token; it asks for one itself where the worker wants it.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
}
PAGE_PATHS: Final = tuple(_FILES)

_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "X-Frame-Options": "DENY",
}


async def page_file(request: Request) -> Response:
    """Return one of the page's files."""
    name, kind = _FILES[request.url.path]
    return Response(_read(name), headers={"Content-Type": kind, **_HEADERS})


@functools.cache
def _read(name: str) -> bytes:
    return resources.files("llorch_serve.http").joinpath("static", name).read_bytes()
