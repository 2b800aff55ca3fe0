"""Stop an unwanted answer: the cluster frees its blocks at once."""

from baton import Client, SamplingParams

endless = SamplingParams(temperature=0.0, max_new_tokens=1000, ignore_eos=True)

with Client() as client:
    with client.generate("Once upon a time", endless) as outputs:
        tokens = 0
        for output in outputs:
            tokens += len(output.tokens)
            if tokens >= 10:
                break  # leaving the block cancels the request
    print(f"cancelled after {tokens} tokens")

    # A deadline ends a request from outside, wherever the request is at that time.
    try:
        client.complete("Once upon a time", endless, deadline=0.02)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
