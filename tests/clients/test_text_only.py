"""A model that takes images, served for text: text on every route, HTTP 400 to all else."""

from collections.abc import Iterator
from typing import Any

import pytest
from http_server import Server, running_server
from model_families import make_family
from routed import ROUTES, chat, response, text_of
from tiny_models import smc_arguments

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJg"
    "gg=="
)
URL = f"data:image/png;base64,{PIXEL}"
MEDIA_KINDS = ("image", "audio", "video")
SEES = {"type": "text", "text": "t5 t6"}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}


def asking(*content: dict[str, Any]) -> dict[str, Any]:
    return chat("m", None, messages=[{"role": "user", "content": [SEES, *content]}])


def responding(*content: dict[str, Any]) -> dict[str, Any]:
    text = {"type": "input_text", "text": "t5 t6"}
    message = {"type": "message", "role": "user", "content": [text, *content]}
    return response("m", None, input=[message])


TEXT = {route: body("m", None) for route, body in ROUTES.items()}
TEXT |= {"/v1/chat/completions": asking(), "/v1/messages": asking(), "/v1/responses": responding()}
MEDIA: list[tuple[str, dict[str, Any]]] = [
    *(("/generate", TEXT["/generate"] | {f"{kind}_data": URL}) for kind in MEDIA_KINDS),
    *(
        ("/v1/chat/completions", asking({"type": f"{kind}_url", f"{kind}_url": {"url": URL}}))
        for kind in MEDIA_KINDS
    ),
    ("/v1/responses", responding({"type": "input_image", "image_url": URL})),
    ("/v1/messages", asking(BLOCK)),
    ("/v1/messages", asking({"type": "tool_result", "tool_use_id": "x", "content": [BLOCK]})),
]


@pytest.fixture(scope="module")
def of_images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("images")
    path = make_family(folder / "model", "qwen3_vl")
    arguments = smc_arguments(path, path, num_particles=2, num_steps=2, served_model_name="m")
    with running_server(folder, **arguments) as running:
        yield running


def test_text_is_answered_on_every_route(of_images: Server) -> None:
    for route, body in TEXT.items():
        answer = of_images.post(route, **body)
        assert answer.status_code == 200, answer.text
        assert text_of(answer.json()), route


def test_what_is_no_text_is_a_bad_request(of_images: Server) -> None:
    for route, body in MEDIA:
        answer = of_images.post(route, **body)
        assert answer.status_code == 400, (route, answer.text)
        assert "text" in answer.text and PIXEL not in answer.text
    assert of_images.post("/generate", **TEXT["/generate"]).status_code == 200
    # SGLang's own warm-up asks there whether to send an image.
    assert not of_images.get("/model_info").json()["has_image_understanding"]
