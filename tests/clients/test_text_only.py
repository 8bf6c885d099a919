"""A model that takes images, served for text: text on every route, HTTP 400 to all else."""

from collections.abc import Iterator
from typing import Any

import pytest
from http_server import Server, running_server
from image_families import make_image_family
from routed import text_of
from tiny_models import smc_arguments

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJg"
    "gg=="
)
URL = f"data:image/png;base64,{PIXEL}"
SEES = {"type": "text", "text": "t5 t6"}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}


def asking(*content: dict[str, Any], **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": [SEES, *content], **more}
    return {"model": "m", "messages": [message], "max_tokens": 4}


def responding(*content: dict[str, Any]) -> dict[str, Any]:
    text = {"type": "input_text", "text": "t5 t6"}
    message = {"type": "message", "role": "user", "content": [text, *content]}
    return {"model": "m", "input": [message], "max_output_tokens": 4}


def ollama(route: str, **more: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "t5 t6", **more}]}
    if route == "/api/generate":
        asked = {"prompt": "t5 t6", **more}
    return {"model": "m", "stream": False, "options": {"num_predict": 4}, **asked}


def generating(**more: Any) -> dict[str, Any]:
    return {"text": "t5 t6", "sampling_params": {"max_new_tokens": 4}, **more}


TEXT: dict[str, dict[str, Any]] = {
    "/generate": generating(),
    "/v1/chat/completions": asking(),
    "/v1/completions": {"model": "m", "prompt": "t5 t6", "max_tokens": 4},
    "/v1/responses": responding(),
    "/v1/messages": asking(),
    "/api/chat": ollama("/api/chat"),
    "/api/generate": ollama("/api/generate"),
}
MEDIA: list[tuple[str, dict[str, Any]]] = [
    ("/generate", generating(image_data=URL)),
    ("/generate", generating(audio_data=URL)),
    ("/generate", generating(video_data=URL)),
    ("/v1/chat/completions", asking({"type": "image_url", "image_url": {"url": URL}})),
    ("/v1/chat/completions", asking({"type": "video_url", "video_url": {"url": URL}})),
    ("/v1/chat/completions", asking({"type": "audio_url", "audio_url": {"url": URL}})),
    ("/v1/responses", responding({"type": "input_image", "image_url": URL})),
    ("/v1/messages", asking(BLOCK)),
    ("/v1/messages", asking({"type": "tool_result", "tool_use_id": "x", "content": [BLOCK]})),
    ("/api/chat", ollama("/api/chat", images=[PIXEL])),
    ("/api/generate", ollama("/api/generate", images=[PIXEL])),
]


@pytest.fixture(scope="module")
def of_images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("images")
    path = make_image_family(folder / "model", "qwen3_vl")
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
