// Curves of the policy's and the critic's training.

import { Curves } from "./charts.js";
import { h, panel, say } from "./dom.js";
import { showAccuracy } from "./overview.js";

const KL = { "metrics.reference_kl": "to the reference", "metrics.behavior_kl": "sampling to learner", "metrics.approx_kl": "within the update" };
const CLIPS = { "metrics.clip_fraction": "ratio", "metrics.dual_clip_fraction": "dual clip", "metrics.importance_cut_fraction": "importance weight", "metrics.rejected_fraction": "left out" };
const WEIGHTS = { "metrics.importance_ratio": "ratio, mean", "metrics.importance_weight": "weight after its bounds, mean" };
const PARTS = { save_s: "checkpoint and snapshot", wait_s: "waiting for units", prepare_s: "preparing the batch", logprob_s: "log-probs", step_s: "steps", record_s: "records", publish_s: "publishing", other_s: "other" };

const CHARTS = [
  ["Loss", {}, (u) => one("loss", u.loss)],
  ["KL, nats per token", {}, (u) => named(KL, u)],
  ["Entropy, nats per token", { fromZero: true }, (u) => one("entropy", u["metrics.entropy"])],
  ["Gradient norm, before clipping", { fromZero: true }, (u) => one("norm", u.grad_norm)],
  ["Clipped tokens, %", { fromZero: true }, (u) => Object.fromEntries(Object.entries(named(CLIPS, u)).map(([name, values]) => [name, values.map((value) => (value === null ? null : 100 * value))]))],
  ["Policy ratio, present to old, mean", {}, (u) => one("ratio", u["metrics.policy_ratio"])],
  ["Policy ratio, largest", {}, (u) => one("ratio", u["metrics.policy_ratio_max"])],
  ["Importance weight, learner to sampler", {}, (u) => named(WEIGHTS, u)],
  ["Learning rate", { fromZero: true }, (u) => one("rate", u.learning_rate)],
  ["Staleness, versions", { fromZero: true }, (u) => ({ "oldest token": u.staleness_max, mean: u.staleness_mean })],
  ["Policy versions in one response, mean", {}, (u) => one("versions", u.num_segments_mean)],
  ["Time of an update, seconds", { fromZero: true, stacked: true, robust: true }, (u) => named(PARTS, u)],
  ["Share of an update in steps and log-probs, %", { fromZero: true }, (u) => one("share", u.seconds?.map((all, index) => (100 * u.compute_s[index]) / Math.max(1e-9, all)))],
  ["Trained tokens per second", { fromZero: true }, (u) => one("tokens", u.num_trained_tokens?.map((tokens, index) => tokens / Math.max(1e-9, u.seconds[index])))],
];
const CRITIC = [
  ["Critic: explained variance of returns", {}, (v) => ({ "each step": v.explained_variance, "moving mean": v.mean_explained_variance })],
  ["Critic: loss", { fromZero: true }, (v) => one("loss", v.loss)],
  ["Critic: values and their targets, means", {}, (v) => ({ values: v.value_mean, targets: v.target_mean })],
  ["Critic: gradient norm, before clipping", { fromZero: true }, (v) => one("norm", v.grad_norm)],
];

const one = (name, values) => (values ? { [name]: values } : {});
const named = (names, columns) => Object.fromEntries(Object.entries(names).filter(([key]) => columns[key]).map(([key, name]) => [name, columns[key]]));

export class LearningTab {
  constructor() {
    this.accuracy = new Curves("Accuracy", { percent: true, named: true, always: true });
    this.reward = new Curves("Reward, mean of the batch", { always: true });
    this.length = new Curves("Length of a response, tokens", { fromZero: true, always: true });
    this.curves = CHARTS.map(([title, options]) => new Curves(title, options));
    this.critic = CRITIC.map(([title, options]) => new Curves(title, { ...options, xName: "step" }));
    this.smooth = h("input", { type: "checkbox", id: "smooth", onchange: () => this.data && this.history(this.data) });
    this.panel = panel("Learning curves", { class: "wide" }, h("div", { class: "charts" }, [this.accuracy, this.reward, this.length, ...this.curves, ...this.critic].map((chart) => chart.element)));
    this.panel.head.append(h("label", { class: "toggle", for: "smooth" }, this.smooth, "smoothed"));
    this.element = h("div", { class: "tab" }, this.panel.element);
  }

  show() {}

  history(data) {
    this.data = data;
    const updates = data.updates;
    const x = updates.update ?? [];
    const amount = this.smooth.checked ? 0.8 : 0;
    this.accuracy.smooth = amount;
    showAccuracy(this.accuracy, data);
    const parts = {};
    (updates.reward_parts ?? []).forEach((row, index) => {
      for (const [name, value] of Object.entries(row ?? {})) (parts[name] ??= Array(x.length).fill(null))[index] = value;
    });
    const rewards = { reward: updates.reward ?? [], ...(Object.keys(parts).length > 1 ? parts : {}) };
    this.reward.show(lines(rewards, x), amount);
    const evaluations = (data.evaluations ?? []).filter((row) => row.is_main);
    const lengths = [...lines({ batch: updates.response_length ?? [] }, x)];
    if (evaluations.length) lengths.push({ name: "held-out", points: true, x: evaluations.map((row) => row.update), y: evaluations.map((row) => row.response_length) });
    this.length.show(lengths, amount);
    CHARTS.forEach(([, , read], index) => this.curves[index].show(lines(read(updates), x), amount));
    const open = (data.values?.gate_open ?? []).indexOf(true);
    this.critic[0].marks = open < 0 ? [] : [{ x: data.values.step[open], text: "the policy may start" }];
    CRITIC.forEach(([, , read], index) => this.critic[index].show(lines(read(data.values ?? {}), data.values?.step ?? []), amount));
    say(this.panel.note, data.num_updates > x.length ? `${x.length} of ${data.num_updates} updates, evenly chosen` : `${data.num_updates} updates`);
  }
}

const lines = (found, x) => Object.entries(found).filter(([, values]) => values?.length).map(([name, y]) => ({ name, x, y }));
