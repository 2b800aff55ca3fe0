"""Send a request to a certain worker, as an orchestrator with its own placement does."""

from baton import Client, SamplingParams

with Client() as client:
    workers = [one for one in client.status()["workers"] if one["role"] == "decode"]
    for worker in workers:
        result = client.complete(
            "Once upon a time",
            SamplingParams(temperature=0.0, max_new_tokens=12),
            target_endpoint=worker["endpoint"],
        )
        print(
            f"{worker['id']} at {worker['endpoint']}: {result.outputs[0].decode} wrote the answer"
        )
