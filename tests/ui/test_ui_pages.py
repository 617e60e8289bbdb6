"""Every page opens in a browser, whatever it is asked to show, and nothing goes wrong in it."""

from __future__ import annotations

import pytest

from retrain.ui.server import VIEWS
from tests.ui.addresses import NASTY, OTHERS, TRAINED
from tests.ui.hostile import VISIBLE


def opened(context, server, address):
    from tests.ui.watch import Watched

    return Watched(context.new_page(), server).open(address)


def test_every_kind_of_page_is_opened_here():
    for addresses in (TRAINED, NASTY, OTHERS):
        assert {path[1:].partition("/")[0] for path in addresses.values()} - {
            "",
            "?sort=name&state=done",
            "?q=hostile",
        } == set(VIEWS)


@pytest.mark.parametrize("name", TRAINED)
def test_a_page_of_a_trained_campaign(context, server, name):
    watched = opened(context, server, TRAINED[name])
    assert watched.page.locator("#main h1").count() == 1
    assert watched.page.locator(".state.wrong").count() == 0, watched.text()
    assert "retrain" in watched.page.title()
    watched.fine().page.close()


@pytest.mark.parametrize("name", OTHERS)
def test_a_page_of_another_tools_run(context, server, name):
    """What is not recorded is said."""
    watched = opened(context, server, OTHERS[name])
    assert watched.page.locator("#main h1").count() == 1
    assert len(watched.text()) > 20
    watched.fine().page.close()


@pytest.mark.parametrize("name", NASTY)
def test_a_page_of_hostile_texts_is_inert(context, server, name):
    watched = opened(context, server, NASTY[name])
    assert watched.page.evaluate(
        "() => [window.hacked, ({}).polluted,"
        " document.querySelectorAll('main script, main img, main svg[onload]').length]"
    ) == [None, None, 0]
    assert any(text in watched.page.content().replace("&lt;", "<").replace("&gt;", ">") for text in VISIBLE)
    assert watched.page.locator(".state.wrong").count() == 0, watched.text(".state.wrong")
    assert not watched.page.evaluate(
        "() => [...document.querySelectorAll('a[href]')].some((each) => /^(javascript|data):/i.test(each.href))"
    )
    watched.fine().page.close()


def test_what_is_not_there_is_said(context, server):
    for address in (
        "/nothing",
        "/campaign/nowhere",
        "/metrics",
        "/rollouts/logs/quickstart/runs/none",
        "/metrics/../../etc",
    ):
        watched = opened(context, server, address)
        assert len(watched.text()) > 20
        assert not any("script raised" in each for each in watched.wrong)
        watched.page.close()
