"""Cards are found under every name that people and tools use for them, and their figures are of one kind."""

import pytest

from serving.cards import CARDS, Card, Host, find_card
from serving.errors import ConfigError


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.short_names[0])
def test_a_card_is_found_under_each_of_its_names(card):
    for name in (card.name, *card.short_names):
        assert find_card(name) is card
        assert find_card(f"  {name.upper()} ") is card
        assert find_card(name.replace("-", "_")) is card


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("GeForce RTX 3090", "NVIDIA GeForce RTX 3090"),
        ("nvidia l4", "NVIDIA L4"),
        ("A100 80GB", "NVIDIA A100-SXM4-80GB"),
        ("MI300X", "AMD Instinct MI300X"),
        ("h100 80gb", "NVIDIA H100 80GB HBM3"),
    ],
)
def test_usual_spellings_are_understood(said, name):
    assert find_card(said).name == name


def test_a_name_of_several_cards_is_refused_with_all_of_them():
    with pytest.raises(ConfigError, match="did you mean a100-40gb or a100-80gb"):
        find_card("A100")


def test_an_unknown_name_gets_near_ones_or_the_list():
    with pytest.raises(ConfigError, match="h200"):
        find_card("H2000")
    with pytest.raises(ConfigError, match="known cards: h100, h200"):
        find_card("Voodoo2")
    with pytest.raises(ConfigError, match="known cards"):
        find_card("")


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.short_names[0])
def test_figures_are_in_base_units(card: Card):
    assert 20 * 2**30 < card.memory_bytes < 300 * 2**30
    assert 0.2e12 < card.memory_bandwidth < 10e12
    assert 50e12 < card.bf16_flops < 3e15
    assert card.fp8_flops is None or card.fp8_flops == pytest.approx(2 * card.bf16_flops, rel=0.02)
    assert 30e9 < card.link_bandwidth < 1e12


def test_no_two_cards_share_a_name():
    names = [name for card in CARDS for name in (card.name.lower(), *card.short_names)]
    assert len(names) == len(set(names))


def test_a_host_without_memory_bandwidth_is_refused():
    with pytest.raises(ConfigError, match="above 0"):
        Host(memory_bandwidth=0)
