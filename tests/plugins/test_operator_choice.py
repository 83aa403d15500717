"""Who provides an operator: the user's list, then score, then the reference; and why not the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from deepinfer_core.api import (
    Choice,
    FallbackPolicy,
    LazyRef,
    LinearRequest,
    OpRequest,
    PagedAttentionRequest,
    PlanError,
    Provider,
    SamplingRequest,
    Supports,
    no,
    yes,
)
from deepinfer_core.plugins import check_user_keys, choose

Providers = list[tuple[str, Provider]]


def linear(**fields: Any) -> LinearRequest:
    shape = {"in_features": 8, "out_features": 4, "dtype": "float32", "out_dtype": "float32"}
    return LinearRequest(**{**shape, "weight_dtype": "float32", **fields})


def attention(**fields: Any) -> PagedAttentionRequest:
    shape = {"q_heads": 2, "kv_heads": 1, "head_dim": 4, "dtype": "float32", "cache_dtype": "float32"}
    return PagedAttentionRequest(**{**shape, "scale": 0.5, "block_size": 16, "cache_group": "full", **fields})


def provider(
    label: str,
    verdict: Supports | Callable[[Any], Any] | int,
    op: str = "gemm.linear",
    *,
    caps: Sequence[str] = (),
    fallback: bool = False,
) -> tuple[str, Provider]:
    plugin, _, name = label.partition(":")
    supports: Any = verdict
    if isinstance(verdict, int):
        verdict = yes(verdict)
    if isinstance(verdict, Supports):
        answer = verdict
        supports = lambda _: answer  # noqa: E731  one fixed answer
    build = LazyRef("x:y")
    return plugin, Provider(name=name, op=op, build=build, caps=caps, supports=supports, fallback=fallback)


REFERENCE = provider("reference:linear", 0, fallback=True)


def pick(
    request: OpRequest,
    providers: Providers,
    *,
    user: Mapping[str, Sequence[str]] | None = None,
    fallback: FallbackPolicy = "error",
    slot: str = "wo",
) -> Choice:
    (choice,) = choose({slot: request}, providers, user=user or {}, fallback=fallback, backend_plugin="acme")
    return choice


def losers(choice: Choice) -> dict[str, str]:
    return {loser.provider: loser.reason for loser in choice.losers}


def test_the_highest_score_wins_and_the_others_say_why_not() -> None:
    choice = pick(
        linear(),
        [provider("acme:slow", 10), provider("acme:fast", 50), provider("bolt:none", no("needs k % 16")), REFERENCE],
    )
    assert (choice.provider, choice.score, choice.source) == ("acme:fast", 50, "score")
    assert losers(choice) == {
        "acme:slow": "score 10 < 50",
        "bolt:none": "needs k % 16",
        "reference:linear": "reference: only a fallback",
    }


def test_a_loser_keeps_its_score() -> None:
    choice = pick(linear(), [provider("acme:slow", 10), provider("acme:fast", 50)])
    assert [(loser.provider, loser.score) for loser in choice.losers] == [("acme:slow", 10)]


def test_a_choice_carries_its_request_as_plain_data() -> None:
    choice = pick(linear(demands={"b", "a"}), [provider("acme:p", 1, caps=["a", "b"])])
    assert choice.request["op"] == "gemm.linear"
    assert (choice.request["in_features"], choice.request["demands"]) == (8, ["a", "b"])


def test_the_order_of_providers_does_not_matter() -> None:
    providers = [provider("acme:a", 10), provider("bolt:b", 50), provider("cord:c", 20), REFERENCE]
    assert pick(linear(), providers) == pick(linear(), providers[::-1])


def test_other_operators_providers_are_no_candidates() -> None:
    choice = pick(linear(), [provider("acme:a", 10), provider("acme:b", 90, op="attention.paged")])
    assert (choice.provider, choice.losers) == ("acme:a", ())


def test_a_provider_that_lacks_a_demand_is_never_asked() -> None:
    def supports(_: OpRequest) -> Supports:
        raise AssertionError("asked")

    choice = pick(
        linear(demands={"batch_invariant", "new_demand"}),
        [
            provider("old:p", supports, caps=["batch_invariant"]),
            provider("new:p", 5, caps=["batch_invariant", "new_demand"]),
        ],
    )
    assert choice.provider == "new:p"
    assert losers(choice) == {"old:p": "lacks: new_demand"}


def test_a_vendor_field_is_demanded_of_every_provider() -> None:
    request = linear(extras={"acme.tile": 64})
    with pytest.raises(PlanError, match=r"bolt:p: lacks: extra:acme\.tile"):
        pick(request, [provider("bolt:p", 50)])
    assert pick(request, [provider("bolt:p", 50), provider("acme:p", 1, caps=["extra:acme.tile"])]).provider == "acme:p"


def test_equal_top_scores_are_an_error_that_prints_the_lines_to_write() -> None:
    with pytest.raises(PlanError) as caught:
        pick(linear(), [provider("bolt:b", 50), provider("acme:a", 50), provider("cord:c", 10)])
    assert str(caught.value) == (
        "slot 'wo' (gemm.linear): equal scores (50); write the one you want: "
        'ops."gemm.linear" = ["acme:a"] or ops."gemm.linear" = ["bolt:b"]'
    )


def test_the_line_that_was_printed_decides() -> None:
    providers = [provider("bolt:b", 50), provider("acme:a", 50)]
    assert pick(linear(), providers, user={"gemm.linear": ["bolt:b"]}).provider == "bolt:b"


def test_equal_scores_below_the_top_do_not_matter() -> None:
    providers = [provider("acme:a", 50), provider("bolt:b", 10), provider("cord:c", 10)]
    assert pick(linear(), providers).provider == "acme:a"


def test_the_same_provider_listed_twice_is_no_tie() -> None:
    one = provider("acme:a", 50)
    assert pick(linear(), [one, one]).provider == "acme:a"


def test_two_providers_of_one_name_are_an_error() -> None:
    with pytest.raises(PlanError, match="'acme' has two providers named 'a'"):
        pick(linear(), [provider("acme:a", 50), provider("acme:a", 40)])


@pytest.mark.parametrize("fallback", ["warn", "allow"])
def test_the_reference_serves_where_the_policy_allows(fallback: FallbackPolicy) -> None:
    choice = pick(linear(), [provider("acme:a", no("not yet")), REFERENCE], fallback=fallback)
    assert (choice.provider, choice.source, choice.score) == ("reference:linear", "reference", 0)
    assert losers(choice) == {"acme:a": "not yet"}


def test_falling_back_with_warn_is_one_log_line_for_each_operator(logs: list[Any]) -> None:
    requests = {"wo": linear(), "wq": linear()}
    choose(requests, [REFERENCE], user={}, fallback="warn", backend_plugin="acme")
    (entry,) = logs
    assert (entry["op"], entry["slots"]) == ("gemm.linear", ["wo", "wq"])


def test_falling_back_with_allow_is_silent(logs: list[Any]) -> None:
    pick(linear(), [REFERENCE], fallback="allow")
    assert logs == []


def test_falling_back_with_error_names_the_slot_every_reason_and_the_line_that_allows_it() -> None:
    with pytest.raises(PlanError) as caught:
        pick(linear(demands={"x"}), [provider("acme:a", 9), provider("reference:linear", 0, caps=["x"], fallback=True)])
    assert str(caught.value) == (
        "slot 'wo' (gemm.linear): only a reference operator can serve it, and fallback is 'error': "
        'acme:a: lacks: x; reference:linear: eligible with score 0; to allow it, write: fallback = "warn"'
    )


def test_a_reference_that_lacks_a_demand_is_refused_like_any_other() -> None:
    with pytest.raises(PlanError, match="no provider can serve it: reference:linear: lacks: batch_invariant"):
        pick(linear(demands={"batch_invariant"}), [REFERENCE], fallback="allow")


def test_a_high_scoring_fallback_still_comes_last() -> None:
    choice = pick(linear(), [provider("acme:a", 1), provider("odd:p", 900, fallback=True)])
    assert choice.provider == "acme:a"


def test_no_provider_of_an_operator_at_all_names_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"no loaded plugin provides 'gemm\.linear'; did you mean 'gemm\.linear2'"):
        pick(linear(), [provider("acme:a", 1, op="gemm.linear2")])


def test_the_users_list_outranks_scores() -> None:
    choice = pick(linear(), [provider("acme:a", 90), provider("bolt:b", 1)], user={"gemm.linear": ["bolt:b"]})
    assert (choice.provider, choice.source) == ("bolt:b", "user")
    assert losers(choice) == {"acme:a": 'not preferred by ops."gemm.linear"'}


def test_the_first_eligible_of_the_users_list_is_taken() -> None:
    providers = [provider("acme:a", no("too old")), provider("bolt:b", 1), provider("cord:c", 99)]
    choice = pick(linear(), providers, user={"gemm.linear": ["acme:a", "bolt:b", "cord:c"]})
    assert choice.provider == "bolt:b"


def test_an_explicit_request_unmet_lists_every_reason_and_never_degrades() -> None:
    providers = [provider("acme:a", no("k not a multiple of 64")), provider("acme:b", no("needs bf16")), REFERENCE]
    with pytest.raises(PlanError) as caught:
        pick(
            linear(), [*providers, provider("bolt:c", 5)], user={"gemm.linear": ["acme:a", "acme:b"]}, fallback="allow"
        )
    assert str(caught.value) == (
        'slot \'wo\' (gemm.linear): ops."gemm.linear" = ["acme:a", "acme:b"] cannot be met: '
        "acme:a: k not a multiple of 64; acme:b: needs bf16"
    )


def test_asking_for_the_reference_is_no_fallback() -> None:
    providers = [provider("acme:a", 50), REFERENCE]
    choice = pick(linear(), providers, user={"gemm.linear": ["reference"]}, fallback="error")
    assert (choice.provider, choice.source) == ("reference:linear", "user")


def test_a_plugins_name_alone_means_its_best_provider() -> None:
    providers = [provider("acme:a", 10), provider("acme:b", 20), provider("bolt:c", 90)]
    assert pick(linear(), providers, user={"gemm.linear": ["acme"]}).provider == "acme:b"


def test_a_plugins_name_alone_with_equal_scores_is_an_error() -> None:
    with pytest.raises(PlanError, match="equal scores"):
        pick(linear(), [provider("acme:a", 10), provider("acme:b", 10)], user={"gemm.linear": ["acme"]})


def test_an_unknown_provider_is_an_error_even_behind_an_eligible_one() -> None:
    with pytest.raises(PlanError, match=r"'acme:faast' provides no gemm\.linear; did you mean 'acme:fast'"):
        pick(linear(), [provider("acme:fast", 10)], user={"gemm.linear": ["acme:fast", "acme:faast"]})


def test_a_provider_of_another_operator_says_what_it_provides() -> None:
    providers = [provider("acme:flash", 10, op="attention.paged"), provider("bolt:b", 1)]
    with pytest.raises(PlanError, match=r"'acme:flash' provides no gemm\.linear \(it provides attention\.paged\)"):
        pick(linear(), providers, user={"gemm.linear": ["acme:flash"]})


KEYS = ["attn", "attention.paged/window/decode", "attention.paged/window", "attention.paged"]


@pytest.mark.parametrize("most_specific", range(len(KEYS)))
def test_the_most_specific_key_decides(most_specific: int) -> None:
    providers = [provider(f"p:n{i}", 10 + i, op="attention.paged") for i in range(len(KEYS))]
    user = {key: [f"p:n{i}"] for i, key in enumerate(KEYS) if i >= most_specific}
    choice = pick(attention(layer_kind="window", phase="decode"), providers, user=user, slot="attn")
    assert choice.provider == f"p:n{most_specific}"


def test_keys_of_another_kind_or_phase_do_not_apply() -> None:
    providers = [provider("p:a", 10, op="attention.paged"), provider("p:b", 20, op="attention.paged")]
    user = {"attention.paged/full": ["p:a"], "attention.paged/window/prefill": ["p:a"]}
    choice = pick(attention(layer_kind="window", phase="decode"), providers, user=user)
    assert choice.provider == "p:b"


def test_one_sampling_stage_can_be_listed_by_its_name() -> None:
    providers = [provider("p:a", 10, op="sampling.stage"), provider("p:b", 20, op="sampling.stage")]
    requests = {
        "stage_top_k": SamplingRequest(stage="top_k", vocab_size=9),
        "stage_top_p": SamplingRequest(stage="top_p", vocab_size=9),
    }
    user = {"sampling.top_k": ["p:a"]}
    chosen = choose(requests, providers, user=user, fallback="error", backend_plugin="p")
    assert [choice.provider for choice in chosen] == ["p:a", "p:b"]


def test_user_keys_are_checked_against_the_whole_plan() -> None:
    requests = {"wo": linear(), "attn": attention(layer_kind="full"), "k": SamplingRequest(stage="top_k", vocab_size=9)}
    good = [
        "wo",
        "gemm.linear",
        "attention.paged/full",
        "attention.paged/full/mixed",
        "sampling.top_k",
        "sampling.stage",
    ]
    check_user_keys({key: [] for key in good}, requests)
    with pytest.raises(PlanError, match=r'ops\."attention\.paged/ful": nothing.*did you mean \'attention\.paged/full'):
        check_user_keys({"attention.paged/ful": ["p"]}, requests)


def raising(_: Any) -> Supports:
    raise KeyError("dtype")


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (raising, "supports() raised KeyError: 'dtype'"),
        (lambda _: True, "supports() returned True, not yes(...) or no(...)"),
        (lambda _: None, "supports() returned None"),
        (lambda _: 50, "supports() returned 50"),
        (lambda _: Supports(None), "supports() refused without a reason"),
        (lambda _: Supports(1001), "score 1001 is not an int of 0 to 1000"),
        (lambda _: Supports(-1), "score -1 is not"),
        (lambda _: Supports(True), "score True is not"),
        (lambda _: Supports(1.5), "score 1.5 is not"),  # type: ignore[arg-type]
    ],
)
def test_a_provider_with_a_bug_is_refused_and_logged_not_fatal(
    answer: Callable[[Any], Any], cause: str, logs: list[Any]
) -> None:
    choice = pick(linear(), [provider("bad:p", answer), provider("acme:a", 5)])
    assert choice.provider == "acme:a"
    assert losers(choice)["bad:p"].startswith(f"provider bug: {cause}")
    (entry,) = logs
    assert (entry["provider"], entry["op"]) == ("bad:p", "gemm.linear")


def test_an_explicit_request_for_a_provider_with_a_bug_is_an_error() -> None:
    with pytest.raises(PlanError, match="bad:p: provider bug"):
        pick(linear(), [provider("bad:p", raising), provider("acme:a", 5)], user={"gemm.linear": ["bad"]})


def test_ctrl_c_in_supports_is_not_swallowed() -> None:
    def interrupted(_: Any) -> Supports:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pick(linear(), [provider("acme:a", interrupted)])


@pytest.mark.parametrize("slot", ["sampling.top_k", "0th", "", "class", "_private", "a b"])
def test_a_slot_must_be_an_identifier(slot: str) -> None:
    with pytest.raises(PlanError, match="must be an identifier"):
        pick(linear(), [provider("acme:a", 5)], slot=slot)


def test_choices_come_in_slot_order() -> None:
    requests = {"z": linear(), "a": linear(in_features=3)}
    chosen = choose(requests, [provider("acme:a", 5)], user={}, fallback="error", backend_plugin="acme")
    assert [choice.slot for choice in chosen] == ["z", "a"]
