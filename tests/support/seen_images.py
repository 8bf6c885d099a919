"""Ask tiny models about images."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from model_families import CONFIGS
from PIL import Image
from tiny_models import tiny_tokenizer

QWEN = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
GEMMA = "<image_soft_token>", "<unused>", "<start_of_image>", "<end_of_image>"
MISTRAL = "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<unused>"
#: By family, names of the words t60 to t63, whose ids `bench/support` gives to images, and what
#: stands for an image in a prompt.
WORDS = {"gemma3": (GEMMA, "<start_of_image>"), "mistral3": (MISTRAL, "[IMG]")}
OF_QWEN = QWEN, "<|vision_start|><|image_pad|><|vision_end|>"
SPECIAL = ("60", "61", "62", "63")  # which transformers would take for images in an answer
MODES = ("smc", "exact", "auto")


def add_processor(path: str, family: str) -> None:
    """Save a processor of images beside a target, with a tokenizer that has their tokens."""
    own = {"gemma3": _of_gemma, "mistral3": _of_mistral}.get(family, _of_qwen)
    own(with_names(family), CONFIGS[family]).save_pretrained(path)


def _of_gemma(tokenizer: Any, config: dict[str, Any]) -> Any:
    side = config["vision_config"]["image_size"]
    images = transformers.Gemma3ImageProcessor(size={"height": side, "width": side})
    length = config["mm_tokens_per_image"]
    return transformers.Gemma3Processor(images, tokenizer, image_seq_length=length)


def _of_mistral(tokenizer: Any, config: dict[str, Any]) -> Any:
    patch, side = (config["vision_config"][name] for name in ("patch_size", "image_size"))
    images = transformers.PixtralImageProcessor(patch_size=patch, size={"longest_edge": side})
    sizes = {"patch_size": patch, "spatial_merge_size": 2}
    return transformers.PixtralProcessor(images, tokenizer, **sizes)


def _of_qwen(tokenizer: Any, config: dict[str, Any]) -> Any:
    vision = config["vision_config"]
    sizes = {"patch_size": vision["patch_size"], "merge_size": vision["spatial_merge_size"]}
    sizes["temporal_patch_size"] = 2
    pixels = (sizes["patch_size"] * sizes["merge_size"]) ** 2  # of a token
    return transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(**sizes, min_pixels=36 * pixels, max_pixels=64 * pixels),
        tokenizer,
        transformers.Qwen3VLVideoProcessor(**sizes),
        chat_template=tokenizer.chat_template,
    )


def with_names(family: str) -> transformers.PreTrainedTokenizerFast:
    """Return the tokenizer of tiny models, whose last words are the special tokens of images."""
    names = WORDS.get(family, OF_QWEN)[0]
    roles = {"image_token": names[0], "boi_token": names[2], "eoi_token": names[3]}
    tokenizer = tiny_tokenizer(64, 1, last=names, extra_special_tokens=roles)
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return tokenizer


def picture(seed: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, 48, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def questions(family: str, behind: int = 0) -> list[tuple[str, list[Image.Image]]]:
    """Return prompts with an image, another, none and both, and these; both begin with one.

    Args:
        family: of the target.
        behind: words of text after the images.
    """
    one = picture(1, 48)
    other = picture(2, 80)
    mark = WORDS.get(family, OF_QWEN)[1]
    about = f"t5 {mark} t7"
    both = f"{mark} t8 {about} t9", [other, one]
    text = "".join(f" t{2 + place * place % 53}" for place in range(behind))
    asked = [(about, [one]), (about, [other]), ("t5 t6 t7", []), both]
    return [(before + text, images) for before, images in asked]


def params_of(index: int, **other: Any) -> dict[str, Any]:
    """Return sampling parameters, of the modes in turn, that forbid what stands for images."""
    return {
        "temperature": 0.0,
        "max_new_tokens": 12,
        "sampling_seed": index,
        "logit_bias": dict.fromkeys(SPECIAL, -100.0),
        "custom_params": {"smc": {"mode": MODES[index // 4 % len(MODES)]}},
        **other,
    }


def read(scheduler: Any, text: str, images: list[Image.Image]) -> dict[str, Any]:
    """Return a prompt's tokens and images as a tokenizer process hands them to a scheduler."""
    if not images:
        return {"input_ids": scheduler.tokenizer.encode(text)}
    given = {"image_data": images, "audio_data": None, "input_text": text}
    nothing = SimpleNamespace(rid=None, video_data=None, audio_data=None, modalities=None)
    process = scheduler._mm_processor.process_mm_data_async
    found = asyncio.run(process(**given, request_obj=nothing, max_req_input_len=None))
    for item in found.mm_items:
        item.set_pad_value()
    return {"input_ids": list(found.input_ids), "mm_inputs": found}


def check_images(engine: Any, family: str) -> None:
    """Ask an engine about images in all modes: they are seen, cached, and read anew."""
    asked = questions(family) * len(MODES)
    params = [params_of(i) for i in range(len(asked))]
    texts = [text for text, _ in asked]
    images = [of or None for _, of in asked]
    answers = engine.generate(texts, params, image_data=images, return_logprob=True)
    infos = [answer["meta_info"] for answer in answers]
    one, other = ([value for value, *_ in info["output_token_logprobs"]] for info in infos[:2])
    assert one != pytest.approx(other, abs=1e-2), "no image is seen"
    assert any(info["num_retractions"] for info in infos), "an image is read anew"
    assert max(info["cached_tokens"] for info in infos) > 20, "an image is cached"
    with pytest.raises(ValueError, match="image_data is given in a session"):
        engine.generate(texts[0], image_data=images[0], session_params={"id": "s"})
