"""/openapi.json: what it says is what is served, and what the readers of bodies read."""

from __future__ import annotations

import json

import jsonschema
import pytest

from llorch_serve.http.app import make_routes
from llorch_serve.http.batches.uploads import FORM
from llorch_serve.http.openapi import document
from llorch_serve.http.operations import OPERATIONS, Answers, route_of
from llorch_serve.http.unknown_fields import fields_of
from support.builders.api_conversations import conversation
from support.harness.batches import front_of
from support.harness.http import fake_front, send

WITH_BODY = [operation for operation in OPERATIONS if operation.body is not None]


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    with front_of(tmp_path_factory.mktemp("kept")) as (running, _):
        yield running


def check(name, body):
    """Hold a body to the schema of that name."""
    schema = {"$ref": f"#/components/schemas/{name}"} | {"components": document()["components"]}
    jsonschema.Draft202012Validator(schema).validate(body)


def test_the_document_is_served_without_a_token():
    with fake_front(token="open sesame") as (front, _):
        answer = send(front.port, "GET", "/openapi.json")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.document == json.loads(json.dumps(document()))
    assert answer.document["openapi"] == "3.1.0"


def test_every_schema_is_one_and_every_reference_leads_somewhere():
    told = document()
    schemas = told["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(told)
    names = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(schemas)


def test_every_route_is_in_the_table_and_nothing_else():
    served = {
        (method, route.path.replace(":path", ""))
        for route in make_routes(None, lambda: (b"", "")).routes
        for method in (route.methods or {"POST"})
        if method != "HEAD"
    }
    assert served == {(operation.method, operation.path) for operation in OPERATIONS}


@pytest.mark.parametrize("operation", WITH_BODY, ids=lambda operation: operation.path)
def test_a_route_reads_the_fields_that_the_table_says(front, operation):
    answer = send(front.port, operation.method, operation.path, {"zz": 1})
    assert answer.status == 400
    error = answer.document.get("error", answer.document)
    (message,) = [item["message"] for item in error["errors"] if item["field"] == "zz"]
    assert f"known are {', '.join(fields_of(operation.body))}" in message


def test_answers_have_the_types_that_the_table_says(front):
    for operation in OPERATIONS:
        if operation.method == "GET" and "{" not in operation.path:
            answer = send(front.port, "GET", operation.path)
            assert answer.headers["content-type"].partition(";")[0] in operation.answers.value
    assert len({kind for each in Answers for kind in each.value}) == 7


def test_queries_and_forms_are_what_the_routes_read(front):
    paths = document()["paths"]
    for path in ("/v1/files", "/v1/batches"):
        names = [told["name"] for told in paths[path]["get"]["parameters"]]
        refused = send(front.port, "GET", f"{path}?zz=1").document["error"]["errors"]
        assert f"known are {', '.join(names)}. " in refused[0]["message"]
    (body,) = paths["/v1/files"]["post"]["requestBody"]["content"].items()
    assert (body[0], list(body[1]["schema"]["properties"])) == ("multipart/form-data", list(FORM))
    assert [told["name"] for told in paths["/v1/files/{file_id}/content"]["get"]["parameters"]] == ["file_id"]


def test_bodies_that_clients_send_are_what_the_document_says():
    for number in range(20):
        sent = conversation(number)
        check("ChatBody", sent.chat())
        check("ResponsesBody", {"input": "Hi"} | sent.responses())
        check("MessagesBody", sent.messages() | {"max_tokens": 3})
    with pytest.raises(jsonschema.ValidationError):
        check("MessagesBody", {"messages": [{"role": "user", "content": [{"type": "image"}]}]})
    with pytest.raises(jsonschema.ValidationError):
        check("ChatBody", {"messages": [], "temprature": 1})


def test_routes_have_names_for_metrics_that_do_not_grow():
    assert route_of("/v1/responses") == "/v1/responses"
    assert route_of("/v1/responses/input_tokens") == "/v1/responses/input_tokens"
    assert route_of("/v1/responses/resp_1") == "/v1/responses/ID"
    assert route_of("/v1/models/a/b") == "/v1/models/ID"
    assert route_of("/v1/files/file-1") == "/v1/files/ID"
    assert route_of("/v1/files/file-1/content") == "/v1/files/ID/content"
    assert route_of("/v1/batches/batch_1/cancel") == "/v1/batches/ID/cancel"
    assert route_of("/v1/batches/batch_1/none") == "other"
    assert route_of("/v1/models/{model_id}") == "/v1/models/ID"
    assert route_of("/wp-login.php") == "other"
