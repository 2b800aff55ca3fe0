"""Stream the answers of a conversation."""

from baton import Client, SamplingParams

params = SamplingParams(temperature=0.0, max_new_tokens=60)
messages = []

with Client() as client:
    for question in ("What is Baton?", "What is the KV cache?"):
        print(f"> {question}")
        messages.append({"role": "user", "content": question})
        answer = ""
        for output in client.chat(messages, params):
            print(output.text, end="", flush=True)
            answer += output.text
        print(f"\n  ({output.finish_reason}, read by {output.prefill}, written by {output.decode})")
        messages.append({"role": "assistant", "content": answer})
