"""Three hundred requests that are none: each is told so, and the server goes on as before."""

import httpx
import pytest
from bad_requests import bad_requests
from fault_client import FaultServer, request

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("server", ["overlapped"], indirect=True)
def test_a_bad_request_is_an_error_of_its_client_alone(server: FaultServer) -> None:
    good = request([3, 4, 5], 7)
    expected = server.alone([good])
    wrong = []
    with httpx.Client(base_url=server.server.url, timeout=60) as client:
        for bad in bad_requests(300):
            headers = {"content-type": bad.content_type}
            answer = client.post(bad.route, content=bad.body, headers=headers)
            if not 400 <= answer.status_code < 500 or len(answer.text.split()) < 3:
                wrong.append(
                    (bad.name, bad.route, bad.body[:120], answer.status_code, answer.text[:200])
                )
    assert wrong == []
    assert server.alone([good]) == expected
    server.assert_nothing_is_lost()
