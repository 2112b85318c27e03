// Reads jobs from standard input, one JSON object a line, and runs each at once.
// tests/support/grpc_clients/program.py describes the lines.
import readline from 'node:readline';

export function write(line) {
  // JSON has no such numbers; protobuf writes them as texts.
  const replacer = (_, value) =>
    typeof value === 'number' && !Number.isFinite(value) ? String(value) : value;
  process.stdout.write(`${JSON.stringify(line, replacer)}\n`);
}

// `attempt(job)` makes one call and returns {code, details, trailers} or {left: true}.
async function run(job, attempt) {
  let result = await attempt(job);
  for (let left = job.retries ?? 0; left > 0 && result.code === 14; left -= 1) {
    write({ id: job.id, retry: result.details });
    result = await attempt(job);
  }
  write({ id: job.id, ...result });
}

export async function runJobs(attempt) {
  const running = [];
  for await (const line of readline.createInterface({ input: process.stdin })) {
    running.push(run(JSON.parse(line), attempt));
  }
  await Promise.all(running);
  process.exit(0);
}
