"""Addresses of a cluster whose pods have a network of their own."""

from __future__ import annotations

from ipaddress import IPv4Network

import pytest

from evertrain.embedded.network.plan import Block, blocks
from evertrain.embedded.node.addresses import Addresses

BLOCK = Block(IPv4Network("10.68.0.0/14"))


def test_where_this_machine_has_routes_to_is_left_alone() -> None:
    used = [IPv4Network("10.70.0.0/24"), IPv4Network("10.73.0.0/16"), IPv4Network("192.0.2.7/32")]
    found = [str(block.network) for block in blocks(used)]
    assert found[0] == "10.76.0.0/14" and "10.68.0.0/14" not in found and "10.72.0.0/14" not in found
    of_10 = [block for block in found if block.startswith("10.")]
    assert len(of_10) == len(set(of_10)) == 60, "neither the last block, which people like to use, nor the first"
    assert found.index("100.64.0.0/14") == 60, "the other ranges come last"
    assert next(blocks([IPv4Network("10.0.0.0/8")])).plan.host(0) == "100.64.0.1"


def test_the_block_of_the_last_time_comes_first_if_it_is_free() -> None:
    assert str(next(blocks([], "10.100.0.0/14")).network) == "10.100.0.0/14"
    assert str(next(blocks([IPv4Network("10.101.0.0/16")], "10.100.0.0/14")).network) == "10.68.0.0/14"


def test_what_is_in_a_block() -> None:
    plan = BLOCK.plan
    assert (plan.host(0), plan.host(254)) == ("10.68.0.1", "10.68.254.1")
    with pytest.raises(ValueError, match="at most 255 nodes"):
        plan.host(255)  # there are the cluster's own addresses
    assert (BLOCK.switch, BLOCK.machine) == ("10.68.255.1", "10.68.255.2")
    assert BLOCK.second(plan.pods(3)[0]) == "10.69.3.2"
    assert plan.services == IPv4Network("10.70.0.0/16")
    assert "10.70.0.9" in plan and "10.69.3.2" not in plan and "pod" not in plan


def test_a_pod_with_the_address_of_a_service_has_one_of_its_node_beside_it() -> None:
    book = Addresses(BLOCK.plan)
    assert book.take("a", 1, ["127.96.0.1", "10.70.0.9"]) == "10.70.0.9"
    assert book.own("a", 1) == "10.68.1.2" == book.own("a", 1)
    assert book.take("b", 1) == "10.68.1.3" == book.own("b", 1)
    book.release("a")
    assert book.take("c", 1, ["10.70.0.9"]) == "10.70.0.9"


def test_a_pod_that_is_no_more_keeps_no_address_from_its_successor() -> None:
    """It may be on a node that is cut off, which doesn't hear of its end."""
    there = {"first", "second"}
    book = Addresses(BLOCK.plan, there.__contains__)
    assert book.take("first", 0, ["10.70.0.9"]) == "10.70.0.9"
    assert book.take("second", 1, ["10.70.0.9"]) == "10.68.1.2", "as long as the first is there"
    there ^= {"first", "third"}
    assert book.take("third", 1, ["10.70.0.9"]) == "10.70.0.9"
    book.release("first")
    assert book.take("fourth", 1, ["10.70.0.9"]) == "10.68.1.3", "it is the third's now"
