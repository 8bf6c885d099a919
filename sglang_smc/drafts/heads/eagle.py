"""EAGLE heads (arXiv 2401.15077): a layer over an embedding and the target's last state."""

from sglang_smc.drafts.heads.base import Config, HeadKind, HeadSizes, Refused

EAGLE = ("LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle")


def sizes(config: Config) -> HeadSizes:
    """Read those of a layer over an embedding and the last state, as an MTP layer is."""
    return HeadSizes("mtp", num_states=1, rows_key="vocab_size")


HEADS = (HeadKind("eagle", EAGLE, "sglang_smc.proposers.eagle3:EagleHead", sizes),)
REFUSED = (
    Refused(
        "an EAGLE 1 or 2 head in the format of speculators, which is not translated", type="eagle"
    ),
    Refused("an EAGLE head of a class that is not supported", part="Eagle"),
)
