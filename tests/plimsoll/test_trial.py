"""Whatever a server does, and whenever an experiment is killed, the old settings and server come back or the new stay."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.experiment import Stop, _exit_code, drive
from plimsoll.journal import Journal, journal_path, refuse_unfinished
from plimsoll.ledger import Conclusion, Record, append, ledger_path, read_ledger
from plimsoll.trial import (
    Finish,
    LadderPolicy,
    OneChange,
    Outcome,
    Seen,
    State,
    Step,
    SweepPolicy,
    Trial,
    TrialResult,
    Verdict,
    advance,
    recovered,
)
from serving.errors import ConfigError, RecordError
from serving.settings import backup, edit_settings, read_settings, restore

OLD = "# kept as it is\nengine: vllm\nmax_batch_size: 8  # few\nmax_model_len: 4096\n"
FORWARD = [
    *(Step.BASELINE, Step.BACKUP, Step.EDIT, Step.RESTART, Step.WAIT, Step.CHECK, Step.LIMITS, Step.MEASURE),
    Step.KEEP,
]
BACK = [
    *(Step.RESTORE, Step.RESTART_BACK, Step.WAIT_BACK, Step.CHECK_BACK, Step.SMOKE_BACK, Step.SETTLE_BACK),
    Step.RECORD,
]


class KilledError(Exception):
    """Stands for the end of the process where a real one is not wanted."""


class FakeWorld:
    """Real settings, journal and ledger; a server that is a file with the settings that it runs.

    `fails` says at which steps what is seen is bad, `hook` is called before and after each step is performed, and
    `starts` says with which settings the server comes up. Time passes by a second a step.
    """

    def __init__(self, folder, *, fails=None, hook=lambda *_: None, starts=lambda _: True):
        self.settings = folder / "s.yaml"
        self.server = folder / "server.json"
        self.fails = fails or {}
        self.hook = hook
        self.starts = starts
        self.t_ns = 1_750_000_000_000_000_000
        self.performed = []
        self.told = []

    def running(self):
        return json.loads(self.server.read_text())

    def start(self):
        values = read_settings(self.settings).values()
        self.server.write_text(json.dumps(values if self.starts(values) else None))

    def notes(self):
        return {"steps": len(self.performed)}

    def on_result(self, result):
        self.told.append(result)

    async def perform(self, state):
        self.hook("before", state.step)
        self.performed.append(state.step)
        self.t_ns += 1_000_000_000
        await asyncio.sleep(0)
        seen = self._perform(state)
        self.hook("after", state.step)
        return seen

    def _perform(self, state):
        step = state.step
        verdict = self.fails.get(step)
        if callable(verdict):
            verdict = verdict(state)
        if verdict is not None:
            return Seen(verdict, f"{step} went badly")
        if step is Step.BACKUP:
            return Seen(backup=backup(self.settings).version)
        if step is Step.EDIT:
            if state.results:
                restore(self.settings, state.backup)
            edit_settings(self.settings, dict(state.changes))
        elif step in (Step.RESTART, Step.RESTART_BACK):
            self.start()
        elif step in (Step.BASELINE, Step.WAIT, Step.WAIT_BACK, Step.SMOKE_BACK):
            return Seen() if self.running() is not None else Seen(Verdict.FAILED, "nothing answers")
        elif step in (Step.CHECK, Step.CHECK_BACK):
            same = self.running() == read_settings(self.settings).values()
            return Seen() if same else Seen(Verdict.FAILED, "other settings run")
        elif step is Step.MEASURE:
            return Seen(score=float(state.changes.get("max_batch_size", 0)))
        elif step is Step.RESTORE:
            restore(self.settings, state.backup)
        elif step in (Step.KEEP, Step.RECORD):
            kept = step is Step.KEEP
            record = Record(
                "experiment-1",
                self.t_ns,
                "set",
                Conclusion.KEPT if kept else Conclusion.ROLLED_BACK,
                state.reason,
                "ann",
            )
            if all(known.id != record.id for known in read_ledger(ledger_path(self.settings)).records):
                append(ledger_path(self.settings), record)
        return Seen()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "s.yaml").write_text(OLD)
    world = FakeWorld(tmp_path)
    world.start()
    return tmp_path


CHANGE = OneChange({"max_batch_size": 16})


def go(world, policy=CHANGE, *, press=()):
    """Drive an experiment to its end; `press` names steps at which Ctrl-C is pressed as they begin."""
    says = []

    async def work():
        stop = Stop(says.append)

        def on_step(state):
            for _ in range(press.count(state.step)):
                asyncio.get_running_loop().call_soon(stop.press)

        with Journal.create(world.settings, {"id": "1"}) as journal:
            state = await drive(State(), policy, world, journal, stop, on_step=on_step)
            if state.step is Step.DONE and state.outcome is not Outcome.LOST:
                journal.finish()
            return state

    return asyncio.run(work())


def recover(world):
    """What `plimsoll experiment recover` does."""

    async def work():
        journal, page = Journal.reopen(world.settings)
        with journal:
            state = State(step=Step.DONE, outcome=Outcome.NOTHING_CHANGED)
            if page.state is not None:
                state = await drive(recovered(page.state), OneChange({}), world, journal, Stop(print))
            journal.finish()
            return state

    return asyncio.run(work())


def assert_whole(folder, *, kept):
    """Settings, server and ledger say the same, and nothing is left over."""
    world = FakeWorld(folder)
    text = (folder / "s.yaml").read_text()
    assert text == (OLD.replace("max_batch_size: 8", "max_batch_size: 16") if kept else OLD)
    assert world.running() == read_settings(world.settings).values()
    assert not journal_path(world.settings).exists()


def conclusions(folder):
    return [record.conclusion for record in read_ledger(folder / "s.ledger.jsonl").records]


# ---- without accidents


def test_a_change_that_went_well_is_kept(folder):
    world = FakeWorld(folder)
    state = go(world)
    assert state.outcome is Outcome.KEPT
    assert world.performed == FORWARD
    assert conclusions(folder) == ["kept"]
    assert_whole(folder, kept=True)


@pytest.mark.parametrize("step", FORWARD[3:-1])
@pytest.mark.parametrize("verdict", [Verdict.FAILED, Verdict.WORSE, Verdict.INCONCLUSIVE])
def test_a_change_that_went_badly_at_any_step_is_rolled_back(folder, step, verdict):
    world = FakeWorld(folder, fails={step: verdict})
    state = go(world)
    assert (state.outcome, state.verdict) == (Outcome.ROLLED_BACK, verdict)
    assert state.reason == f"{step}: {step} went badly"
    assert world.performed[-len(BACK) :] == BACK
    assert conclusions(folder) == ["rolled back"]
    assert_whole(folder, kept=False)


def test_a_value_with_which_the_server_does_not_start_is_rolled_back_and_serving_again(folder):
    world = FakeWorld(folder, starts=lambda values: values["max_batch_size"] <= 8)
    state = go(world)
    assert (state.outcome, state.reason) == (Outcome.ROLLED_BACK, "wait: nothing answers")
    assert_whole(folder, kept=False)


def test_an_edit_that_fails_needs_no_restart(folder):
    world = FakeWorld(folder, fails={Step.EDIT: Verdict.FAILED})
    assert go(world).outcome is Outcome.ROLLED_BACK
    assert Step.RESTART_BACK not in world.performed
    assert_whole(folder, kept=False)


@pytest.mark.parametrize("step", [Step.BASELINE, Step.BACKUP])
def test_what_fails_before_the_edit_changes_nothing_and_records_nothing(folder, step):
    world = FakeWorld(folder, fails={step: Verdict.FAILED})
    assert go(world).outcome is Outcome.NOTHING_CHANGED
    assert conclusions(folder) == []
    assert_whole(folder, kept=False)


@pytest.mark.parametrize("step", BACK[1:5])
def test_a_server_that_is_slow_to_come_back_is_restarted_once_more(folder, step):
    state = go(
        FakeWorld(
            folder, fails={Step.LIMITS: Verdict.FAILED, step: lambda at: Verdict.FAILED if at.attempts < 2 else None}
        )
    )
    assert state.outcome is Outcome.ROLLED_BACK
    assert state.attempts == 2
    assert f"{step}: " in state.trouble
    assert_whole(folder, kept=False)


@pytest.mark.parametrize("step", BACK[1:5])
def test_a_server_that_never_comes_back_is_lost_with_the_old_settings_and_the_way_to_recover(folder, step):
    state = go(FakeWorld(folder, fails={Step.LIMITS: Verdict.FAILED, step: Verdict.FAILED}))
    assert state.outcome is Outcome.LOST
    assert (folder / "s.yaml").read_text() == OLD
    with pytest.raises(ConfigError, match="recover"):
        refuse_unfinished(folder / "s.yaml")
    assert recover(FakeWorld(folder)).outcome is Outcome.ROLLED_BACK
    assert_whole(folder, kept=False)


def test_kv_use_that_does_not_settle_is_told_and_no_more(folder):
    state = go(FakeWorld(folder, fails={Step.CHECK: Verdict.FAILED, Step.SETTLE_BACK: Verdict.FAILED}))
    assert (state.outcome, state.trouble) == (Outcome.ROLLED_BACK, "settle back went badly")


def test_a_lost_server_is_restarted_twice_each_time_and_told_without_what_was_told_before(folder):
    fails = {Step.CHECK: Verdict.FAILED, Step.WAIT_BACK: Verdict.FAILED, Step.RECORD: Verdict.FAILED}
    world = FakeWorld(folder, fails=fails)
    state = go(world)
    assert world.performed.count(Step.RESTART_BACK) == 2
    # That the ledger cannot be written as well does not make it a small matter.
    assert state.outcome is Outcome.LOST
    again = recovered(state)
    assert (again.step, again.attempts, again.trouble) == (Step.RESTORE, 0, "")


def test_what_a_full_disk_cut_off_is_taken_out_of_the_journal_again(folder, monkeypatch):
    with Journal.create(folder / "s.yaml", {}) as journal:
        journal.write(State(), {})
        whole = journal.path.read_bytes()
        with monkeypatch.context() as patch:
            write = os.write
            patch.setattr(os, "write", lambda handle, data: write(handle, data[:10]))
            with pytest.raises(RecordError, match="disk full"):
                journal.write(State(), {})
        assert journal.path.read_bytes() == whole


def test_a_restart_that_began_is_a_touch_before_it_has_ended():
    at = advance(State(step=Step.EDIT, changes=CHANGE.changes), Seen(), CHANGE)
    assert (at.step, at.touched) == (Step.RESTART, True)


def test_what_the_old_server_is_as_bad_at_was_not_the_change(folder):
    fails = {Step.MEASURE: Verdict.WORSE, Step.SETTLE_BACK: Verdict.INCONCLUSIVE}
    state = go(FakeWorld(folder, fails=fails))
    assert (state.outcome, state.verdict, state.reason) == (
        Outcome.ROLLED_BACK,
        Verdict.INCONCLUSIVE,
        "settle back went badly",
    )
    assert _exit_code(state, "set") == 3
    assert_whole(folder, kept=False)


def test_a_ledger_that_cannot_be_written_is_said_and_can_be_recovered(folder):
    state = go(FakeWorld(folder, fails={Step.KEEP: Verdict.FAILED}))
    assert (state.outcome, state.trouble) == (Outcome.UNRECORDED, "keep went badly")


# ---- Ctrl-C


@pytest.mark.parametrize("step", FORWARD[2:-1])
def test_ctrl_c_while_a_change_is_tried_rolls_back(folder, step):
    state = go(FakeWorld(folder), press=[step])
    assert (state.outcome, state.verdict) == (Outcome.ROLLED_BACK, Verdict.INTERRUPTED)
    assert state.reason == f"{step}: interrupted"
    assert_whole(folder, kept=False)


def test_ctrl_c_between_two_steps_is_not_lost(folder):
    async def work():
        stop = Stop(print)
        with Journal.create(folder / "s.yaml", {}) as journal:
            world = FakeWorld(folder)
            on_step = lambda state: stop.press() if state.step is Step.MEASURE else None  # noqa: E731
            state = await drive(State(), CHANGE, world, journal, stop, on_step=on_step)
            journal.finish()
            return state

    assert asyncio.run(work()).verdict is Verdict.INTERRUPTED
    assert_whole(folder, kept=False)


@pytest.mark.parametrize("step", FORWARD[:2])
def test_ctrl_c_before_the_edit_ends_at_once(folder, step):
    state = go(FakeWorld(folder), press=[step])
    assert (state.outcome, state.verdict) == (Outcome.NOTHING_CHANGED, Verdict.INTERRUPTED)
    assert_whole(folder, kept=False)


@pytest.mark.parametrize("step", BACK)
def test_one_ctrl_c_on_the_way_back_does_not_stop_it(folder, step):
    state = go(FakeWorld(folder, fails={Step.MEASURE: Verdict.WORSE}), press=[step])
    assert (state.outcome, state.verdict) == (Outcome.ROLLED_BACK, Verdict.WORSE)
    assert_whole(folder, kept=False)


def test_ctrl_c_while_it_is_kept_keeps_it(folder):
    assert go(FakeWorld(folder), press=[Step.KEEP]).outcome is Outcome.KEPT
    assert_whole(folder, kept=True)


def test_a_second_ctrl_c_on_the_way_back_leaves_the_rest_to_recover(folder):
    state = go(FakeWorld(folder, fails={Step.MEASURE: Verdict.WORSE}), press=[Step.WAIT_BACK, Step.WAIT_BACK])
    assert state.step is Step.WAIT_BACK
    with pytest.raises(ConfigError, match="recover"):
        go(FakeWorld(folder))
    recover(FakeWorld(folder))
    assert_whole(folder, kept=False)


# ---- kill -9


def kill_at(folder, moment, step, **options):
    """Run an experiment in a child process that kills itself with signal 9 at that moment of that step."""
    pid = os.fork()
    if pid == 0:

        def hook(when, at):
            if (when, at) == (moment, step):
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            go(FakeWorld(folder, hook=hook, **options))
        finally:
            os._exit(7)  # it came to its end unharmed
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", FORWARD)
def test_killed_at_any_step_of_a_good_change_it_is_recovered_whole(folder, step, moment):
    assert kill_at(folder, moment, step)
    with pytest.raises(ConfigError, match="recover"):
        go(FakeWorld(folder))
    state = recover(FakeWorld(folder))
    kept = step is Step.KEEP
    assert state.outcome is (
        Outcome.KEPT
        if kept
        else Outcome.NOTHING_CHANGED
        if step in (Step.BASELINE, Step.BACKUP)
        else Outcome.ROLLED_BACK
    )
    assert_whole(folder, kept=kept)
    assert len(conclusions(folder)) == (0 if state.outcome is Outcome.NOTHING_CHANGED else 1)
    assert go(FakeWorld(folder), OneChange({"max_model_len": 2048})).outcome is Outcome.KEPT


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", BACK)
def test_killed_at_any_step_of_the_way_back_it_is_recovered_whole(folder, step, moment):
    assert kill_at(folder, moment, step, starts=lambda values: values["max_batch_size"] <= 8)
    assert recover(FakeWorld(folder)).outcome is Outcome.ROLLED_BACK
    assert_whole(folder, kept=False)
    assert conclusions(folder) == ["rolled back"]


@pytest.mark.parametrize("step", BACK)
def test_a_recovery_that_is_killed_is_recovered(folder, step):
    assert kill_at(folder, "after", Step.WAIT)

    def die(when, at):
        if (when, at) == ("before", step):
            raise KilledError

    with pytest.raises(KilledError):
        recover(FakeWorld(folder, hook=die))
    assert recover(FakeWorld(folder)).outcome is Outcome.ROLLED_BACK
    assert_whole(folder, kept=False)


@pytest.mark.parametrize("step", [Step.EDIT, Step.RESTART, Step.MEASURE])
def test_killed_in_a_later_trial_of_a_sweep_the_settings_before_the_sweep_come_back(folder, step):
    pid = os.fork()
    if pid == 0:
        world = FakeWorld(folder)

        def hook(when, at):
            if when == "after" and at is step and len(world.told) == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        world.hook = hook
        try:
            go(world, SweepPolicy("max_batch_size", [16, 32]))
        finally:
            os._exit(7)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    assert recover(FakeWorld(folder)).outcome is Outcome.ROLLED_BACK
    assert_whole(folder, kept=False)


# ---- the journal


def test_nothing_begins_beside_an_experiment_that_runs(folder):
    with Journal.create(folder / "s.yaml", {}):
        with pytest.raises(ConfigError, match="runs, or was killed"):
            Journal.create(folder / "s.yaml", {})
        with pytest.raises(ConfigError, match="is running"):
            Journal.reopen(folder / "s.yaml")


def test_without_an_experiment_there_is_nothing_to_recover(folder):
    with pytest.raises(ConfigError, match="nothing to recover"):
        Journal.reopen(folder / "s.yaml")


def test_only_the_owner_reads_the_restart_command(folder):
    with Journal.create(folder / "s.yaml", {"restart": "secret"}):
        assert journal_path(folder / "s.yaml").stat().st_mode & 0o777 == 0o600


@given(st.integers(min_value=0, max_value=10_000))
def test_a_journal_cut_anywhere_says_the_last_step_that_is_whole(tmp_path_factory, cut):
    settings = tmp_path_factory.mktemp("cut") / "s.yaml"
    states = [State(step=step, backup=1) for step in FORWARD[:4]]
    with Journal.create(settings, {"id": "1"}) as journal:
        for state in states:
            journal.write(state, {})
    path = journal_path(settings)
    whole = path.read_bytes()
    cut %= len(whole)
    path.write_bytes(whole[:cut])
    # A line without its line feed is whole all the same.
    lines = sum(bool(line) and line in whole.split(b"\n") for line in whole[:cut].split(b"\n"))
    journal, page = Journal.reopen(settings)
    journal.close()
    assert page.state == (states[lines - 2] if lines >= 2 else None)


def test_a_journal_goes_on_after_a_line_that_a_crash_cut_off(folder):
    with Journal.create(folder / "s.yaml", {"id": "1"}) as journal:
        journal.write(State(step=Step.EDIT, backup=1), {})
    with journal_path(folder / "s.yaml").open("ab") as file:
        file.write(b'{"state": {"st')
    journal, page = Journal.reopen(folder / "s.yaml")
    with journal:
        assert page.state.step is Step.EDIT
        journal.write(State(step=Step.RESTORE, backup=1), {})
    journal, page = Journal.reopen(folder / "s.yaml")
    journal.close()
    assert page.state.step is Step.RESTORE


@pytest.mark.parametrize(
    "content",
    [
        b"hello\n\nworld\n",
        b'{"schema": "other"}\n{}\n',
        b'{"schema": "plimsoll.experiment-journal/1", "plan": {}}\n{"state": {"step": "fly"}, "notes": {}}\n',
    ],
)
def test_what_is_no_journal_is_refused(folder, content):
    journal_path(folder / "s.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match="by hand"):
        Journal.reopen(folder / "s.yaml")


def test_a_journal_that_cannot_be_written_ends_the_trial_and_not_the_way_back(folder, monkeypatch):
    write = Journal.write

    def full(self, state, notes):
        if state.step in (Step.LIMITS, *BACK):
            raise RecordError("No space left on device")
        write(self, state, notes)

    monkeypatch.setattr(Journal, "write", full)
    state = go(FakeWorld(folder))
    assert (state.outcome, state.reason) == (Outcome.ROLLED_BACK, "No space left on device")
    assert_whole(folder, kept=False)


@pytest.mark.parametrize("step", [Step.BASELINE, Step.BACKUP])
def test_without_a_journal_nothing_begins_and_that_is_no_success(folder, monkeypatch, step):
    write = Journal.write

    def full(self, state, notes):
        if state.step is step:
            raise RecordError("No space left on device")
        write(self, state, notes)

    monkeypatch.setattr(Journal, "write", full)
    state = go(FakeWorld(folder))
    assert (state.outcome, state.reason) == (Outcome.NOTHING_CHANGED, "No space left on device")
    assert _exit_code(state, "set") == 4
    assert_whole(folder, kept=False)


def test_a_file_has_one_journal_by_whatever_link_it_is_named(folder):
    link = folder / "current.yaml"
    link.symlink_to(folder / "s.yaml")
    with Journal.create(folder / "s.yaml", {}), pytest.raises(ConfigError, match="runs, or was killed"):
        refuse_unfinished(link)


# ---- the pure machine

seen = st.builds(
    Seen, verdict=st.sampled_from(list(Verdict)), reason=st.just("r"), backup=st.just(1), score=st.floats(0, 100)
)
policies = st.sampled_from(
    [
        CHANGE,
        OneChange({"kv_cache_dtype": "fp8"}),
        SweepPolicy("max_batch_size", [4, 16, 32]),
        SweepPolicy("max_batch_size", [4, 16, 32], keep_best=True),
        LadderPolicy([{"quantization": "fp8"}], [2048, 1024], [4, 2]),
    ]
)


@given(policies, st.lists(seen, min_size=80, max_size=80))
def test_every_experiment_comes_to_an_end_and_its_states_survive_json(policy, sights):
    state = State()
    for sight in sights:
        assert State.from_document(json.loads(json.dumps(state.document()))) == state
        if state.step is Step.DONE:
            break
        state = advance(state, sight, policy)
    assert state.step is Step.DONE
    assert state.outcome is not None


@given(policies, st.lists(seen, min_size=80, max_size=80))
def test_once_a_restart_began_nothing_ends_without_the_old_server_unless_it_is_kept_or_lost(policy, sights):
    state, steps = State(), []
    for sight in sights:
        if state.step is Step.DONE:
            break
        steps.append(state.step)
        state = advance(state, sight, policy)
    if Step.RESTART in steps and state.outcome is Outcome.ROLLED_BACK:
        assert Step.RESTORE in steps
        assert Step.RESTART_BACK in steps
    if state.outcome is Outcome.KEPT:
        assert Step.RESTORE not in steps


@given(policies, st.lists(seen, min_size=80, max_size=80), st.integers(0, 79))
def test_recovery_never_goes_on_with_a_trial(policy, sights, killed_after):
    state = State()
    for sight in sights[:killed_after]:
        if state.step is Step.DONE:
            return
        state = advance(state, sight, policy)
    if state.step is Step.DONE:
        return
    assert recovered(state).step in (Step.DONE, Step.KEEP, Step.RECORD, Step.RESTORE)


# ---- policies


def walk(policy, verdicts, *, elsewhere=(), old_score=None):
    """Labels that the policy tries when `verdicts` says how each label ends, and how it finishes."""
    results = []
    while True:
        after = policy.next(results, old_score)
        if isinstance(after, Finish):
            return [result.label for result in results], after
        assert isinstance(after, Trial)
        verdict = Verdict.OK if after.label in verdicts else Verdict.FAILED
        results.append(
            TrialResult(
                after.label,
                after.changes,
                verdict,
                score=verdicts.get(after.label),
                elsewhere=after.label in elsewhere,
                reason="restart: it ended with code 7" if after.label in elsewhere else "",
            )
        )


SWEEP = SweepPolicy("max_batch_size", [4, 16, 32])
LADDER = LadderPolicy([{"quantization": "fp8"}, {"quantization": "int4"}], [32768, 16384], [8, 4])
Q8, Q4, C32, C16 = "quantization=fp8", "quantization=int4", "max_model_len=32768", "max_model_len=16384"
DEEPEST = "quantization=int4, max_model_len=16384"


def test_a_sweep_tries_all_values_and_names_the_best():
    labels, end = walk(SWEEP, {"max_batch_size=4": 10.0, "max_batch_size=32": 30.0})
    assert labels == ["max_batch_size=4", "max_batch_size=16", "max_batch_size=32"]
    assert (end.keep, end.verdict) == (None, Verdict.OK)
    assert "max_batch_size=32" in end.reason


def test_a_sweep_keeps_the_best_when_asked(folder):
    policy = SweepPolicy("max_batch_size", [4, 16, 12], keep_best=True)
    world = FakeWorld(folder)
    state = go(world, policy)
    assert state.outcome is Outcome.KEPT
    assert_whole(folder, kept=True)
    assert [result.label for result in world.told] == ["max_batch_size=4", "max_batch_size=16", "max_batch_size=12"]


def test_a_sweep_keeps_the_old_value_when_none_is_better():
    scores = {"max_batch_size=4": 10.0, "max_batch_size=16": 30.0}
    policy = SweepPolicy("max_batch_size", [4, 16], keep_best=True)
    assert walk(policy, scores, old_score=29.0)[1].keep == 1
    end = walk(policy, scores, old_score=31.0)[1]
    assert (end.keep, end.verdict) == (None, Verdict.OK)
    assert "no value is better than the old one" in end.reason


def test_the_score_of_the_old_settings_is_what_a_sweep_has_to_beat(folder):
    class Scored(FakeWorld):
        def _perform(self, state):
            return Seen(score=14.0) if state.step is Step.BASELINE else super()._perform(state)

    state = go(Scored(folder), SweepPolicy("max_batch_size", [4, 12], keep_best=True))
    assert (state.outcome, state.old_score) == (Outcome.ROLLED_BACK, 14.0)
    assert_whole(folder, kept=False)


def test_a_sweep_without_a_good_value_fails():
    assert walk(SWEEP, {})[1] == Finish(None, "no value of max_batch_size went well", Verdict.FAILED)


@pytest.mark.parametrize(
    ("good", "tried", "kept", "said"),
    [
        ({Q8: 1}, [Q8, C32, C16], Q8, "only quantisation helps: weights bind"),
        ({C16: 1}, [Q8, Q4, C32, C16], C16, "only the context helps: the KV cache binds"),
        ({Q4: 1, C32: 1}, [Q8, Q4, C32], C32, "both help"),
        ({Q8: 1, C16: 1}, [Q8, C32, C16], Q8, "both help"),
        ({Q8: 1, C32: 1}, [Q8, C32], C32, "both help"),
        ({DEEPEST: 1}, [Q8, Q4, C32, C16, DEEPEST], DEEPEST, "weights and KV cache both bind"),
        (
            {f"{DEEPEST}, max_batch_size=4": 1},
            [Q8, Q4, C32, C16, DEEPEST, f"{DEEPEST}, max_batch_size=8", f"{DEEPEST}, max_batch_size=4"],
            f"{DEEPEST}, max_batch_size=4",
            "only together",
        ),
        (
            {},
            [Q8, Q4, C32, C16, DEEPEST, f"{DEEPEST}, max_batch_size=8", f"{DEEPEST}, max_batch_size=4"],
            None,
            "this card cannot",
        ),
    ],
)
def test_the_ladder_walks_the_order_of_retreat_and_says_what_binds(good, tried, kept, said):
    labels, end = walk(LADDER, good)
    assert labels == tried
    assert (None if end.keep is None else labels[end.keep]) == kept
    assert said in end.reason
    assert end.verdict is (Verdict.FAILED if kept is None else Verdict.OK)


@pytest.mark.parametrize(
    ("policy", "good", "elsewhere", "said"),
    [
        (LadderPolicy(batch=[8, 4]), {"max_batch_size=4": 1}, (), "quantisation and context were not tried"),
        (LadderPolicy(context=[16384], batch=[4]), {"max_model_len=16384, max_batch_size=4": 1}, (), "not tried"),
        (LadderPolicy(context=[16384]), {C16: 1}, (), "no quantisation could be tried: the KV cache binds"),
        (LadderPolicy([{"quantization": "fp8"}]), {Q8: 1}, (), "weights or KV cache may bind"),
        (LadderPolicy([{"quantization": "fp8"}], [16384]), {C16: 1}, [Q8], "no quantisation could be tried"),
        (LadderPolicy([{"quantization": "fp8"}], [16384]), {Q8: 1}, [C16], "weights or KV cache may bind"),
    ],
)
def test_a_ladder_claims_nothing_of_what_it_did_not_try(policy, good, elsewhere, said):
    _, end = walk(policy, good, elsewhere=elsewhere)
    assert end.keep is not None
    assert said in end.reason
    assert "only" not in end.reason


def test_a_ladder_whose_rungs_fail_at_their_restart_says_nothing_of_the_card():
    _, end = walk(LADDER, {}, elsewhere=[Q4])
    assert (end.keep, end.verdict) == (None, Verdict.INCONCLUSIVE)
    assert end.reason.endswith("failed at something else than the card: restart: it ended with code 7")


def test_a_ladder_that_did_not_go_every_way_does_not_say_that_nothing_helps():
    _, end = walk(LadderPolicy(batch=[8, 4]), {})
    assert end.verdict is Verdict.FAILED
    assert end.reason.startswith(
        "no step helped, and quantisation and context were not tried: go further, or this card"
    )


def test_a_rung_that_serves_but_cannot_be_proved_is_no_sign_that_the_card_cannot():
    unproved = TrialResult(Q8, {"quantization": "fp8"}, Verdict.INCONCLUSIVE, "drift cannot be told", served=True)
    end = LadderPolicy([{"quantization": "fp8"}]).next([unproved])
    assert end == Finish(None, "quantization=fp8 serves, but drift cannot be told", Verdict.INCONCLUSIVE)


def test_a_ladder_of_a_server_that_has_enough_changes_nothing(folder):
    world = FakeWorld(folder, fails={Step.BASELINE: Verdict.ENOUGH})
    state = go(world, LadderPolicy(context=[1024]))
    assert (state.outcome, state.verdict, world.performed) == (Outcome.NOTHING_CHANGED, Verdict.OK, [Step.BASELINE])


def test_kv_quantisation_that_helps_says_that_the_kv_cache_binds():
    _, end = walk(LadderPolicy([{"kv_cache_dtype": "fp8"}], [1024]), {"kv_cache_dtype=fp8": 1})
    assert end.reason == "only quantisation helps: the KV cache binds"


def test_a_ladder_of_batch_sizes_alone_tries_them():
    assert walk(LadderPolicy(batch=[8, 4]), {"max_batch_size=4": 1})[0] == ["max_batch_size=8", "max_batch_size=4"]


def test_a_ladder_begins_with_a_server_that_does_not_start_and_ends_with_one_that_does(folder):
    world = FakeWorld(folder, starts=lambda values: values["max_model_len"] <= 1024)
    world.start()
    assert world.running() is None
    state = go(world, LadderPolicy(context=[2048, 1024]))
    assert (state.outcome, state.label) == (Outcome.KEPT, "max_model_len=1024")
    assert world.running()["max_model_len"] == 1024


def test_a_ladder_without_an_end_leaves_the_settings_as_they_were(folder):
    world = FakeWorld(folder, starts=lambda _: False)
    world.start()
    state = go(world, LadderPolicy(context=[2048, 1024]))
    assert (state.outcome, state.verdict) == (Outcome.ROLLED_BACK, Verdict.FAILED)
    assert (folder / "s.yaml").read_text() == OLD


def test_only_changes_that_can_alter_answers_need_the_quality_probe(folder):
    assert not CHANGE.needs_quality({"max_batch_size": 16})
    world = FakeWorld(folder)
    go(world, OneChange({"kv_cache_dtype": "fp8"}))
    assert world.performed.index(Step.QUALITY) == world.performed.index(Step.MEASURE) + 1


def test_drift_that_is_not_accepted_rolls_back(folder):
    state = go(FakeWorld(folder, fails={Step.QUALITY: Verdict.WORSE}), OneChange({"kv_cache_dtype": "fp8"}))
    assert (state.outcome, state.verdict) == (Outcome.ROLLED_BACK, Verdict.WORSE)
    assert_whole(folder, kept=False)


def test_the_journal_lies_beside_the_settings():
    assert journal_path(Path("a/hy3-serving.yaml")) == Path("a/hy3-serving.experiment.jsonl")
