// A client with @grpc/grpc-js: grpc_js.mjs PROTOS ADDRESSES [OPTIONS], a JSON object for the channel.
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

import { runJobs, write } from './jobs.mjs';

const [protos, addresses, options = '{}'] = process.argv.slice(2);
const definition = protoLoader.loadSync('baton/v1/generation.proto', {
  includeDirs: [protos],
  enums: String,
  longs: String,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).baton.v1;
const target = addresses.includes(',') ? `ipv4:${addresses}` : addresses;
const client = new GenerationService(
  target,
  grpc.credentials.createInsecure(),
  JSON.parse(options),
);

function resultOf({ code, details, metadata }) {
  return { code, details, trailers: metadata?.getMap() ?? {} };
}

function whole(job, ...settings) {
  return new Promise((resolve) => {
    const call = client.Generate(job.request, ...settings, (_, message) => {
      if (message) write({ id: job.id, message });
    });
    call.on('status', (status) => resolve(resultOf(status)));
  });
}

async function streamed(job, ...settings) {
  const call = client.GenerateStream(job.request, ...settings);
  const status = new Promise((resolve) => call.on('status', resolve));
  let numRead = 0;
  try {
    for await (const message of call) {
      write({ id: job.id, message });
      numRead += 1;
      if (numRead === job.leaveAfter) return { left: true };
      if (numRead === job.cancelAfter) call.cancel();
    }
  } catch (error) {
    return resultOf(error);
  }
  return resultOf(await status);
}

await runJobs((job) => {
  const metadata = new grpc.Metadata();
  for (const [name, value] of Object.entries(job.metadata ?? {})) metadata.set(name, value);
  const settings = job.timeoutS ? { deadline: Date.now() + 1000 * job.timeoutS } : {};
  return (job.method === 'Generate' ? whole : streamed)(job, metadata, settings);
});
