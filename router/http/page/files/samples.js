// The last looks at the cluster: rates between two of them, and each replica's last minutes. The
// router keeps no history; this one begins when the page is opened.

const KEPT_MS = 10 * 60 * 1000;
const MAX_POINTS = 400;
const MAX_CHANGES = 50;
const MAX_SEATS = 2000;
const MAX_LATE_S = 60;
const GONE_MS = 10 * 60 * 1000;

export const BAD_STATES = ["lost", "ejected", "gone"];

// A number of the router's JSON, where zeros are left out and 64-bit integers are texts.
export function number(value) {
  return Number(value ?? 0);
}

export function stateOf(replica) {
  return String(replica.state ?? "").replace("REPLICA_STATE_", "").toLowerCase() || "unknown";
}

export function tierOf(replica) {
  return String(replica.role ?? "").replace("WORKER_ROLE_", "").toLowerCase() || "unknown";
}

// The share of the pool's blocks that requests hold; null if it is not known.
export function usedKv(replica) {
  const { load } = replica;
  return number(load?.num_blocks) ? 1 - number(load.num_free_blocks) / number(load.num_blocks) : null;
}

export function keyOf(replica) {
  return `${replica.model ?? ""} ${replica.address ?? ""}`;
}

export class Samples {
  constructor() {
    this.now = null;
    this.before = null;
    this.points = new Map();
    this.seats = new Map(); // by address, also of replicas that are lost
    this.gone = new Map();
    this.changes = [];
  }

  // Adds what the router has answered, unless the look is no newer than the last one: processes of a
  // router keep looks of their own. After a clock was set back, looks are new again.
  add(state) {
    const lateS = this.now ? this.now.time_s - state.time_s : -1;
    if (lateS >= 0 && lateS < MAX_LATE_S) return;
    this.before = this.now;
    this.now = state;
    const timeMs = state.time_s * 1000;
    for (const worker of state.configuration.workers) {
      this.seats.set(worker.address, number(worker.max_num_seqs));
    }
    this.noteChanges(timeMs);
    for (const replica of this.replicas()) this.addPoint(replica, timeMs);
    for (const [key, points] of this.points) {
      if (points.at(-1).timeMs < timeMs - KEPT_MS) this.points.delete(key);
    }
    while (this.seats.size > MAX_SEATS) this.seats.delete(this.seats.keys().next().value);
  }

  replicas(state = this.now) {
    return state?.cluster.replicas ?? [];
  }

  // The replicas, and those that are known no more, as those of a register are after a crash.
  shownReplicas() {
    return [...this.replicas(), ...[...this.gone.values()].map((entry) => entry.replica)];
  }

  addPoint(replica, timeMs) {
    const key = keyOf(replica);
    const points = this.points.get(key) ?? [];
    const { load } = replica;
    points.push({
      timeMs,
      kv: usedKv(replica),
      running: load ? number(load.num_running) : null,
      waiting: load ? number(load.num_waiting) : null,
    });
    while (points.length > MAX_POINTS || points[0].timeMs < timeMs - KEPT_MS) points.shift();
    this.points.set(key, points);
  }

  noteChanges(timeMs) {
    if (!this.before) return;
    const before = new Map(this.replicas(this.before).map((replica) => [keyOf(replica), replica]));
    for (const replica of this.replicas()) {
      const earlier = before.get(keyOf(replica)) ?? this.gone.get(keyOf(replica))?.replica;
      this.gone.delete(keyOf(replica));
      before.delete(keyOf(replica));
      this.noteChange(earlier, replica, timeMs);
    }
    for (const [key, replica] of this.now.num_hidden_replicas ? [] : before) {
      const problem = "it is not in the list of replicas any more";
      const gone = { ...replica, state: "GONE", problem, load: undefined, counters: undefined };
      this.gone.set(key, { replica: gone, sinceMs: timeMs });
      this.note(timeMs, gone, problem);
    }
    for (const [key, { sinceMs }] of this.gone) {
      if (sinceMs < timeMs - GONE_MS) this.gone.delete(key);
    }
  }

  noteChange(earlier, replica, timeMs) {
    const state = stateOf(replica);
    if (!earlier) {
      this.note(timeMs, replica, "it was added");
    } else if (stateOf(earlier) !== state) {
      const before = stateOf(earlier);
      const isBack = state === "ready" && BAD_STATES.includes(before);
      const text = isBack ? `it is back after being ${before}` : `it was ${before}`;
      this.note(timeMs, replica, replica.problem ?? text);
    } else if (earlier.worker_id && replica.worker_id && earlier.worker_id !== replica.worker_id) {
      this.note(timeMs, replica, "its process has started again");
    }
  }

  note(timeMs, replica, text) {
    const { address } = replica;
    this.changes.unshift({ timeMs, tier: tierOf(replica), address, state: stateOf(replica), text });
    this.changes.length = Math.min(this.changes.length, MAX_CHANGES);
  }

  // How much of something the router did per second between the last two looks; null if unknown.
  rate(countOf) {
    if (!this.before) return null;
    const seconds = this.now.time_s - this.before.time_s;
    const growth = countOf(this.now) - countOf(this.before);
    return seconds > 0 && growth >= 0 ? growth / seconds : null;
  }

  // The growth of a replica's count between the last two looks; null after it has started again.
  growth(replica, countOf) {
    const key = keyOf(replica);
    const earlier = this.replicas(this.before).find((other) => keyOf(other) === key);
    if (!earlier || earlier.worker_id !== replica.worker_id) return null;
    if (!earlier.counters || !replica.counters) return null;
    const growth = countOf(replica) - countOf(earlier);
    return growth >= 0 ? growth : null;
  }

  replicaRate(replica, countOf) {
    const growth = this.growth(replica, countOf);
    return growth === null ? null : growth / (this.now.time_s - this.before.time_s);
  }
}
