async def test_the_bundled_server_answers_and_starts_empty(redis_client):
    assert await redis_client.ping()
    assert await redis_client.dbsize() == 0
