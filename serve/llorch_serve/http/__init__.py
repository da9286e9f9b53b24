"""The worker over HTTP: OpenAI's routes, the older worker's, health, metrics and a page. Needs the extra
``http``.

Input: a loaded :class:`llorch_serve.requests.TextGenerator` and an address.
:class:`llorch_serve.http.server.HttpFront` is what ``llorch serve --http`` adds to the gRPC server, in the
same process and on the same event loop. Importing this package imports neither Starlette nor uvicorn.
"""
