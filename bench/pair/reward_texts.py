"""Input of the reward model; a complete text ends with EOS, a prefix does not."""

TEMPLATE = "<|user|>{prompt}<|assistant|>{output}"
WHOLE_TEMPLATE = TEMPLATE + "<|eos|>"
