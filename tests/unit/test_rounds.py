"""Where a round stops, who goes on, and what the particles share."""

import math

import pytest
import torch

from sglang_smc.round.steps import still_open
from sglang_smc.smc import rounds
from sglang_smc.smc.resampling import SCHEMES
from sglang_smc.smc.rounds import BlockCut, WeightRules

INF = math.inf
EQUAL = [0.0, 0.0]


def rules(
    size: int, num_steps: int, tau: float, resample_at: str, evidence_threshold: float = 0.0
) -> WeightRules:
    """The same rules for ``size`` groups; the evidence threshold is the paper's."""
    return WeightRules(
        num_steps=torch.full((size,), num_steps),
        ess_threshold=torch.full((size,), tau, dtype=torch.float64),
        at_token=torch.full((size,), resample_at == "token"),
        evidence_threshold=torch.full((size,), evidence_threshold, dtype=torch.float64),
    )


def cut(
    log_weights: list[float],
    increments: list[list[float]],
    tau: float,
    resample_at: str,
    *,
    evidence_threshold: float = 0.0,
    coin: float = 0.5,
) -> BlockCut:
    """`rounds.cut` for one group, increments given per particle."""
    return rounds.cut(
        torch.tensor([log_weights], dtype=torch.float64),
        torch.tensor([increments]),
        rules(1, len(increments[0]), tau, resample_at, evidence_threshold),
        torch.ones(1, len(log_weights), dtype=torch.bool),
        torch.tensor([coin], dtype=torch.float64),
    )


def all_present(log_weights: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(log_weights, dtype=torch.bool)


def shape_of(found: BlockCut) -> tuple[int, bool, bool]:
    return int(found.num_columns), bool(found.resample), bool(found.all_zero)


class TestCut:
    def test_block_keeps_all_columns_however_low_the_ess_falls_on_the_way(self) -> None:
        found = cut(EQUAL, [[50.0, -50.0, 0.0], [0.0, 0.0, 0.0]], 0.9, "block")
        assert shape_of(found) == (3, False, False)
        assert found.ess == 2.0

    def test_block_tests_the_last_column(self) -> None:
        found = cut(EQUAL, [[0.0, 0.0, 9.0], [0.0, 0.0, 0.0]], 0.9, "block")
        assert shape_of(found) == (3, True, False)
        assert found.log_weights.tolist() == [[9.0, 0.0]]

    def test_token_stops_at_the_first_failing_column_and_keeps_it(self) -> None:
        found = cut(EQUAL, [[0.0, 9.0, -9.0, 0.0], [0.0, 0.0, 0.0, 0.0]], 0.9, "token")
        assert shape_of(found) == (2, True, False)
        assert found.log_weights.tolist() == [[9.0, 0.0]]
        assert found.ess.item() == pytest.approx(1.0, abs=1e-3)

    def test_token_stops_at_the_very_first_column(self) -> None:
        assert shape_of(cut(EQUAL, [[9.0, 0.0], [0.0, 0.0]], 0.9, "token")) == (1, True, False)

    def test_token_keeps_all_columns_where_none_fails(self) -> None:
        found = cut(EQUAL, [[0.1, 0.1], [0.0, 0.0]], 0.5, "token")
        assert shape_of(found) == (2, False, False)
        assert found.log_weights[0, 0].item() == pytest.approx(0.2)

    @pytest.mark.parametrize("resample_at", ["block", "token"])
    def test_no_threshold_never_resamples(self, resample_at: str) -> None:
        found = cut(EQUAL, [[99.0, 9.0], [0.0, -INF]], 0.0, resample_at)
        assert shape_of(found) == (2, False, False)

    @pytest.mark.parametrize("resample_at", ["block", "token"])
    @pytest.mark.parametrize("num_particles", [1, 3, 49])
    def test_full_threshold_does_not_resample_equal_weights(
        self, num_particles: int, resample_at: str
    ) -> None:
        increments = [[0.1, -0.7, 1.3]] * num_particles
        found = cut([0.0] * num_particles, increments, 1.0, resample_at)
        assert shape_of(found) == (3, False, False)
        assert found.ess == num_particles

    @pytest.mark.parametrize("resample_at", ["block", "token"])
    def test_full_threshold_resamples_the_slightest_difference(self, resample_at: str) -> None:
        assert cut(EQUAL, [[1e-3], [0.0]], 1.0, resample_at).resample

    @pytest.mark.parametrize("resample_at", ["block", "token"])
    def test_an_ess_at_the_threshold_is_not_below_it(self, resample_at: str) -> None:
        found = cut([0.0] * 4, [[0.0], [0.0], [-INF], [-INF]], 0.5, resample_at)
        assert found.ess == 2.0
        assert not found.resample

    @pytest.mark.parametrize("resample_at", ["block", "token"])
    @pytest.mark.parametrize("column", [0, 1, 2])
    def test_both_stop_before_the_column_in_which_all_die(
        self, column: int, resample_at: str
    ) -> None:
        increments = [[0.5 if i != column else -INF for i in range(3)]] * 2
        found = cut([0.25, 0.25], increments, 0.5, resample_at)
        assert shape_of(found) == (column, False, True)
        assert found.log_weights.tolist() == [[0.25 + 0.5 * column] * 2]

    def test_block_before_a_dead_column_tests_the_columns_it_keeps(self) -> None:
        found = cut(EQUAL, [[9.0, -INF, 0.0], [0.0, -INF, 0.0]], 0.9, "block")
        assert shape_of(found) == (1, True, True)

    def test_particles_that_die_one_after_another(self) -> None:
        """One dies in each column: the last column that leaves one alive is kept."""
        increments = [[-INF, 0.0, 0.0], [0.0, -INF, 0.0], [0.0, 0.0, -INF]]
        found = cut([0.0] * 3, increments, 0.1, "block")
        assert shape_of(found) == (2, False, True)
        assert found.log_weights.tolist() == [[-INF, -INF, 0.0]]

    def test_token_stops_where_some_die_and_that_is_too_many(self) -> None:
        found = cut([0.0] * 4, [[-INF, 0.0]] * 3 + [[0.0, 0.0]], 0.5, "token")
        assert shape_of(found) == (1, True, False)

    def test_the_partially_dead_go_on_with_weight_zero(self) -> None:
        found = cut(EQUAL, [[-INF, 5.0], [0.0, 1.0]], 0.5, "block")
        assert shape_of(found) == (2, False, False)
        assert found.log_weights.tolist() == [[-INF, 1.0]]

    @pytest.mark.parametrize("resample_at", ["block", "token"])
    def test_particles_dead_before_the_round_stay_dead(self, resample_at: str) -> None:
        found = cut([-INF, 0.0], [[3.0], [-INF]], 0.5, resample_at)
        assert shape_of(found) == (0, False, True)
        assert found.log_weights.tolist() == [[-INF, 0.0]]

    @pytest.mark.parametrize("resample_at", ["block", "token"])
    def test_nan_counts_as_dead(self, resample_at: str) -> None:
        found = cut(EQUAL, [[math.nan], [math.nan]], 0.5, resample_at)
        assert shape_of(found) == (0, False, True)
        assert not found.log_weights.isnan().any()

    @pytest.mark.parametrize("resample_at", ["block", "token"])
    def test_one_particle_never_resamples(self, resample_at: str) -> None:
        assert shape_of(cut([0.0], [[-7.0, 3.0]], 1.0, resample_at)) == (2, False, False)

    @pytest.mark.parametrize("resample_at", ["block", "token"])
    def test_greedy_is_verification_of_the_longest_agreeing_draft(self, resample_at: str) -> None:
        """At temperature 0 an increment is 0 where the draft is the target's argmax, else -inf."""
        agree = [[0.0, 0.0, -INF, 0.0]] * 2
        assert shape_of(cut(EQUAL, agree, 0.5, resample_at)) == (2, False, True)
        assert shape_of(cut(EQUAL, [[0.0] * 4] * 2, 0.5, resample_at)) == (4, False, False)
        assert shape_of(cut(EQUAL, [[-INF] * 4] * 2, 0.5, resample_at)) == (0, False, True)

    def test_groups_are_cut_each_at_their_own_column(self) -> None:
        increments = torch.zeros(3, 2, 4)
        increments[0, 0, 2] = 9.0
        increments[1, :, 1] = -INF
        found = rounds.cut(
            torch.zeros(3, 2, dtype=torch.float64),
            increments,
            rules(3, 4, 0.9, "token"),
            torch.ones(3, 2, dtype=torch.bool),
            torch.full((3,), 0.5, dtype=torch.float64),
        )
        assert found.num_columns.tolist() == [3, 1, 4]
        assert found.resample.tolist() == [True, False, False]
        assert found.all_zero.tolist() == [False, True, False]


class TestResample:
    def test_only_the_named_groups_change(self) -> None:
        log_weights = torch.tensor([[0.0, -INF], [1.0, -INF]], dtype=torch.float64)
        u = torch.full((2, 2), 0.5, dtype=torch.float64)
        where = torch.tensor([True, False])
        step = rounds.resample(log_weights, where, all_present(log_weights), u, "systematic")
        assert step.ancestors.tolist() == [[0, 0], [0, 1]]
        assert step.log_weights.tolist() == [[0.0, 0.0], [1.0, -INF]]
        assert step.log_evidence.tolist() == pytest.approx([-math.log(2), 0.0])

    def test_slot_i_copies_ancestor_i(self) -> None:
        """All weight on the last particle: a reversed direction would point at slot numbers."""
        log_weights = torch.tensor([[-INF, -INF, 2.0]], dtype=torch.float64)
        u = torch.zeros(1, 3, dtype=torch.float64)
        where = torch.tensor([True])
        step = rounds.resample(log_weights, where, all_present(log_weights), u, "multinomial")
        assert step.ancestors.tolist() == [[2, 2, 2]]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([0, 0, 0], [1, 1, 1]),
        ([1, 0, 0], [1, 0, 0]),  # the end itself still counts
        ([0, 1, 0], [1, 1, 0]),
        ([0, 1, 1], [1, 1, 0]),
        ([1, 1, 1], [1, 0, 0]),
        ([0, 0, 1], [1, 1, 1]),
    ],
)
def test_still_open(ends: list[int], expected: list[int]) -> None:
    assert still_open(torch.tensor([[ends]], dtype=torch.bool)).int().tolist() == [[expected]]


class TestGroupsOfDifferentSize:
    """Beside a group of four, one of two particles and two columns, and one alone."""

    present = torch.tensor([[True] * 4, [True, True, False, False], [True] + [False] * 3])
    log_weights = torch.where(present, 0.0, -INF).double()
    num_steps = torch.tensor([3, 2, 1])

    def cut(self, increments: torch.Tensor, tau: float, resample_at: str = "block") -> BlockCut:
        coins = torch.full((3,), 0.5, dtype=torch.float64)
        chosen = rules(3, 3, tau, resample_at)._replace(num_steps=self.num_steps)
        return rounds.cut(self.log_weights, increments, chosen, self.present, coins)

    def test_each_keeps_its_own_columns_and_none_is_dead(self) -> None:
        found = self.cut(torch.zeros(3, 4, 3), 1.0)
        assert found.num_columns.tolist() == [3, 2, 1]
        assert not found.all_zero.any()

    def test_the_threshold_is_a_fraction_of_a_groups_own_particles(self) -> None:
        """Two equal particles of two are all there are; of four they would be too few."""
        found = self.cut(torch.zeros(3, 4, 3), 1.0)
        assert found.ess.tolist() == [4.0, 2.0, 1.0]
        assert not found.resample.any()
        uneven = torch.zeros(3, 4, 3)
        uneven[1, 0, 0] = 1.0
        assert self.cut(uneven, 1.0).resample.tolist() == [False, True, False]

    def test_what_lies_beyond_a_groups_columns_kills_nobody(self) -> None:
        increments = torch.zeros(3, 4, 3)
        increments[1, :, 2] = -INF
        found = self.cut(increments, 1.0, "token")
        assert found.num_columns.tolist() == [3, 2, 1]
        assert not found.all_zero.any()

    @pytest.mark.parametrize("method", list(SCHEMES))
    def test_resampling_leaves_absent_particles_as_they_are(self, method: str) -> None:
        generator = torch.Generator().manual_seed(0)
        log_weights = self.log_weights + torch.randn(3, 4, generator=generator).double()
        u = torch.rand(3, 4, generator=generator, dtype=torch.float64)
        everywhere = torch.ones(3, dtype=torch.bool)
        step = rounds.resample(log_weights, everywhere, self.present, u, method)
        stay = torch.arange(4).expand(3, 4)
        assert torch.equal(step.ancestors[~self.present], stay[~self.present])
        assert (step.log_weights[~self.present] == -INF).all()
        assert self.present.gather(1, step.ancestors)[self.present].all()
        for group, size in enumerate((4, 2, 1)):
            alone = rounds.resample(
                log_weights[[group], :size],
                everywhere[:1],
                torch.ones(1, size, dtype=torch.bool),
                u[[group], :size],
                method,
            )
            assert torch.equal(step.ancestors[[group], :size], alone.ancestors)
            assert torch.allclose(step.log_evidence[[group]], alone.log_evidence, atol=1e-14)


class TestEvidence:
    """Two equally wrong drafts: the effective sample size is full, the evidence is not."""

    WRONG = ((-1.0, -1.0), (-1.0, -1.0))

    def kept(self, threshold: float, coin: float, resample_at: str = "block") -> int:
        increments = [list(row) for row in self.WRONG]
        found = cut(EQUAL, increments, 0.5, resample_at, evidence_threshold=threshold, coin=coin)
        assert found.log_weights.tolist() == [[-1.0 * found.num_columns] * 2]
        assert not found.all_zero, "the target's turn comes, but nobody has died"
        return int(found.num_columns)

    @pytest.mark.parametrize("resample_at", ["block", "token"])
    def test_columns_end_where_the_coin_exceeds_their_evidence(self, resample_at: str) -> None:
        """Evidence e^-1 = .368 and e^-2 = .135."""
        assert self.kept(1.0, 0.1, resample_at) == 2
        assert self.kept(1.0, 0.2, resample_at) == 1
        assert self.kept(1.0, 0.4, resample_at) == 0
        assert self.kept(0.5, 0.4, resample_at) == 1
        assert self.kept(0.0, 0.999, resample_at) == 2
        assert self.kept(INF, 0.0, resample_at) == 0

    def test_token_stops_at_whichever_comes_first(self) -> None:
        uneven = [[9.0, -9.0, -9.0], [0.0, 0.0, -9.0]]
        assert shape_of(cut(EQUAL, uneven, 0.9, "token", evidence_threshold=1.0))[0] == 1
        assert shape_of(cut(EQUAL, uneven, 0.0, "token", evidence_threshold=1.0))[0] == 2
