"""Ask tiny models of Qwen3-VL about images, and score answers by transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from model_families import CONFIGS
from PIL import Image
from tiny_models import tiny_tokenizer

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
#: Of the words t60 to t63, whose ids `bench/support` gives to images.
NAMES = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
SPECIAL = ("60", "61", "62", "63")  # which transformers would take for images in an answer
MODES = ("smc", "exact", "mixed", "auto")


def add_processor(path: str) -> None:
    """Save a processor of images beside a target, with a tokenizer that has their tokens."""
    tokenizer, vision = with_names(), CONFIGS["qwen3_vl"]["vision_config"]
    sizes = {"patch_size": vision["patch_size"], "merge_size": vision["spatial_merge_size"]}
    sizes["temporal_patch_size"] = 2
    pixels = (sizes["patch_size"] * sizes["merge_size"]) ** 2  # of a token
    transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(**sizes, min_pixels=4 * pixels, max_pixels=64 * pixels),
        tokenizer,
        transformers.Qwen3VLVideoProcessor(**sizes),
        chat_template=tokenizer.chat_template,
    ).save_pretrained(path)


def with_names() -> transformers.PreTrainedTokenizerFast:
    """Return the tokenizer of tiny models, whose last words are the special tokens of images."""
    tokenizer = tiny_tokenizer(64, 1, last=NAMES)
    tokenizer.add_special_tokens({"additional_special_tokens": list(NAMES)})
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return tokenizer


def picture(seed: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, 48, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def check_images(engine: Any, path: str) -> None:
    """Hold log-probabilities of answers to images against transformers, in all modes."""
    one, other = picture(1, 48), picture(2, 80)
    asked = [
        *((f"t5 {IMAGE} t7", [each]) for each in (one, other)),
        ("t5 t6 t7", []),
        (f"t5 {IMAGE} t7 t8 {IMAGE} t9", [other, one]),
    ]
    texts, images = map(list, zip(*asked * 2 * len(MODES), strict=True))
    params = [
        {
            "temperature": float(i < len(texts) // 2),
            "max_new_tokens": 12,
            "sampling_seed": i,
            "logit_bias": dict.fromkeys(SPECIAL, -100.0),
            "custom_params": {"smc": {"mode": MODES[i // len(asked) % len(MODES)]}},
        }
        for i in range(len(texts))
    ]
    answers = engine.generate(
        texts, params, image_data=[of or None for of in images], return_logprob=True
    )
    processor = transformers.AutoProcessor.from_pretrained(path)
    auto = transformers.AutoModelForImageTextToText
    model = auto.from_pretrained(path, dtype=torch.float32)
    for text, seen, given, answer in zip(texts, images, params, answers, strict=True):
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
        engine.generate(texts[0], image_data=[one], session_params={"id": "s"})


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
