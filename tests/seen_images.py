"""Ask tiny models about images, and score answers by transformers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
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


def questions(family: str) -> list[tuple[str, list[Image.Image]]]:
    """Return prompts with an image, another, none and both, and these."""
    one, other = picture(1, 48), picture(2, 80)
    mark = WORDS.get(family, OF_QWEN)[1]
    about = f"t5 {mark} t7"
    both = f"{about} t8 {mark} t9", [other, one]
    return [(about, [one]), (about, [other]), ("t5 t6 t7", []), both]


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


def check_images(engine: Any, path: str, family: str) -> None:
    """Hold log-probabilities of answers to images against transformers, in all modes."""
    asked = questions(family) * 2 * len(MODES)
    params = [params_of(i, temperature=float(i < len(asked) // 2)) for i in range(len(asked))]
    texts, images = [text for text, _ in asked], [of or None for _, of in asked]
    answers = engine.generate(texts, params, image_data=images, return_logprob=True)
    processor = transformers.AutoProcessor.from_pretrained(path)
    auto = transformers.AutoModelForImageTextToText
    model = auto.from_pretrained(path, dtype=torch.float32)
    for (text, seen), given, answer in zip(asked, params, answers, strict=True):
        log_p = log_probs(model, processor, text, seen, answer["output_ids"])
        told = [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]
        chosen = log_p.gather(1, torch.tensor(answer["output_ids"]).unsqueeze(1)).squeeze(1)
        assert told == pytest.approx(chosen.tolist(), abs=2e-3)
        if not given["temperature"]:
            assert log_p.argmax(1).tolist() == answer["output_ids"]
    infos = [answer["meta_info"] for answer in answers]
    assert any(info["num_retractions"] for info in infos), "an image is read anew"
    assert max(info["cached_tokens"] for info in infos) > 20, "an image is cached"
    with pytest.raises(ValueError, match="image_data is given in a session"):
        engine.generate(texts[0], image_data=images[0], session_params={"id": "s"})


@torch.no_grad()
def log_probs(
    model: Any, processor: Any, text: str, images: list[Image.Image], output_ids: list[int]
) -> torch.Tensor:
    """Return log p ``[T, V]`` of each token of an answer, by transformers."""
    given = dict(processor(text=[text], images=images or None, return_tensors="pt"))
    own = torch.tensor([output_ids])
    text_of = {"input_ids": own, "attention_mask": own * 0 + 1, "mm_token_type_ids": own * 0}
    given |= {name: torch.cat([given[name], text_of[name]], 1) for name in text_of}
    logits = model(**given).logits[0, -own.shape[1] - 1 : -1]
    logits[:, list(map(int, SPECIAL))] -= 100.0
    return logits.log_softmax(-1)
