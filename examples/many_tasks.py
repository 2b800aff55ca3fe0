"""Send more requests at once than the cluster admits: refused ones are tried again."""

import asyncio

from baton import AsyncClient, SamplingParams


async def main() -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=4)
    async with AsyncClient() as client:
        calls = [
            client.complete(f"Number {number} is", params, max_retries=50) for number in range(100)
        ]
        results = await asyncio.gather(*calls)
    tokens = sum(result.usage.completion_tokens for result in results)
    print(f"{len(results)} answers with {tokens} tokens")


asyncio.run(main())
