"""Serve a GGUF file on a cluster that this script starts and ends, and hold a short chat with it.

The argument is the file, or org/name/FILE.gguf on the hub.
"""

import sys

from baton import LLM, SamplingParams

question = [{"role": "user", "content": "Name three uses of a hash table."}]

with LLM(sys.argv[1], decode=1, kv_memory="256MiB", max_model_len=1024) as llm:
    print(llm.tokenizer.chat_template.names, llm.tokenizer.vocab_size, "tokens")
    (answer,) = llm.chat(question, SamplingParams(temperature=0, max_new_tokens=64))

print(answer.finish_reason, repr(answer.text))
