"""What SGLang's kits ask, and answers that satisfy them."""

import json

from sglang.test.kits.basic_scheduler_stress_kit import _CONCURRENT_PREFIX, _CONCURRENT_QA
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.matched_stop_kit import MANY_NEW_TOKENS_PROMPT

#: Of the kit's long prompt: not a lesson, but to be read as whole words.
FILLER = "the quick brown fox jumps over the lazy dog. " * 20
_SYSTEM = "<|user|>You are a helpful AI assistant<|user|>"
_STORY = "The rain fell on the old tower.\nA wizard and a queen looked for the sword."
_CODE = (
    "from fastapi import FastAPI\n\napp = FastAPI()\n\n\n@app.get('/')\ndef root():\n    return {}"
)
_ENDLESS = " and so on," * 100 + "..."
_TALE = "Tell me a very long story about a wizard."
_FACTS = '{"name": "Paris", "population": 2100000}'
_LLAMA_PROMPT = """\
<|begin_of_text|><|start_header_id|>system<|end_header_id|>
You are a helpful assistant.<|eot_id|><|start_header_id|>user<|end_header_id|>
What is 2 + 2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>
        """
_FRANCE = "<|user|>What is the capital of France? Answer in a few words."
_JSON_PROMPT = "Introduce the capital of France. Return in a JSON format. The JSON Schema is: "

_PLAIN = {
    "Q: What is the capital of France?\nA:": " Paris.",
    "Q: What is 17 multiplied by 23? Reply with just the number.\nA:": " 391",
    "Q: The three primary colors are red, blue, and ___. Fill in the blank.\nA:": " Yellow.",
    "Write a single sentence about a sunny day in the park.": " Birds sang in the warm sun.",
    "Briefly explain what gravity is.": " It is the pull between all things that have mass.",
    "Q: What is the capital of France? Reply in one word.\nA:": " Paris\n",
    "Q: What is the capital of France? Just one word.\nA:": " Paris",
    "The capital of France is": " Paris, a city on the Seine with two million people.",
    "Hello, my name is": " Ann, and I live in a small town by the sea.",
    "The president of the United States is": " elected every four years, in November.",
    "The future of AI is": " what people make of it, today and tomorrow.",
    "I have a very good idea on": " how to make bread at home.",
    "Today is a sunndy day and": " all the birds sing in the trees.",
    "Human: Give me a fully functional FastAPI server. Show the python code.\n\nAssistant:": _CODE,
    "Generate a simple JSON with name, age, and city:": '{"name":"Ann","age":7,"city":"Rome"}',
    "Generate a log entry:": "[2024-01-01T12:00:00Z] INFO: System.process"
    " - Operation done successfully",
    _LLAMA_PROMPT: "4",
    MANY_NEW_TOKENS_PROMPT: _STORY,
    _TALE: _ENDLESS,
    # The second turn of a session; the first is cut after 16 tokens.
    _TALE + " and so on," * 4 + " Continue the story in great detail.": _ENDLESS,
    **{f"Question {n}: Write a short essay about the number {n}.": _ENDLESS for n in range(8)},
}

#: After these the model goes on, so that only a grammar ends them in time.
_CONSTRAINED = {
    "Generate an email address:": "user@example.com",
    "Generate a greeting:": "Hello",
    "Generate a three-digit number:": "123",
    "Generate a phone number:": "(123) 456-7890",
    "Generate a date in YYYY-MM-DD format:": "2024-01-01",
    "Generate a hex color code:": "#12AB3F",
    "Configure the service with optional settings:": '{"name":"config_service", '
    '"arguments":{"theme":"dark"}}',
    "Here is the information of the capital of France in the JSON format.\n": '{"name": "Paris",'
    ' "population": 2100000, "country": "France", "capital": "Paris"}',
    **{
        _JSON_PROMPT + json.dumps(schema): _FACTS
        for schema in (JSONConstrainedMixin.json_schema, None)
    },
}
_CONSTRAINED_CHATS = {
    "<|user|>You are a helpful assistant.<|user|>Give me a json": '{"a": 1}',
    _SYSTEM + _JSON_PROMPT + json.dumps(JSONConstrainedMixin.json_schema): _FACTS,
    "<|user|>You are a helpful AI assistant that gives a short answer."
    "<|user|>What is the capital of Bulgaria?": '{"capital": "Sofia"}',
}
_MORE = " and more"

_CHATS = {
    "<|user|>Say hi in one word.": "Hi",
    _SYSTEM + MANY_NEW_TOKENS_PROMPT: _STORY,
    _SYSTEM + "What is 2 + 2?": "4",
    "<|user|>What is 2+2?": "It is 4.",
    _FRANCE: "Paris.",
    "<|user|>You are a helpful assistant. Always respond in French." + _FRANCE: "C'est Paris.",
    "<|user|>You are a helpful assistant.\nAlways be concise." + _FRANCE: "Paris",
    "<|user|>You are a pirate. Respond in pirate speak." + _FRANCE: "Paris, arr!",
    "<|user|>What is the capital of France?<|user|>Always respond in French."
    "<|user|>Answer in a few words.": "C'est Paris.",
    "<|user|>My name is Alice.<|assistant|>Hello Alice! Nice to meet you.<|eos|>"
    "<|user|>What is my name?": "Alice",
    "<|user|>Say hello.<|assistant|>Hello!<|eos|><|user|>Say goodbye.": "Goodbye!",
    "<|user|>Tell me a long story about a dragon.": _STORY,
}


def lessons() -> list[tuple[str, str]]:
    """Prompts as the model sees them, and answers; one that ends in dots is not to end there."""
    plain = dict(_PLAIN)
    for question, city in _CONCURRENT_QA:
        plain[_CONCURRENT_PREFIX + question] = " " + city.capitalize()
    plain |= {question: answer + _MORE for question, answer in _CONSTRAINED.items()}
    chats = _CHATS | {chat: answer + _MORE for chat, answer in _CONSTRAINED_CHATS.items()}
    question = "<|user|>What is 1+3?<|assistant|>"
    return [
        *plain.items(),
        *((chat + "<|assistant|>", answer) for chat, answer in chats.items()),
        (question, "<think>1 and 3 make 4.</think>It is 4."),
        (question + "<think></think>", "It is 4."),
    ]
