// A client with @connectrpc/connect-node: connect.mjs PROTOS ADDRESS. `gen` has its stubs.
import { fromJson, toJson } from '@bufbuild/protobuf';
import { ConnectError, createClient } from '@connectrpc/connect';
import { createGrpcTransport } from '@connectrpc/connect-node';

import {
  GenerateRequestSchema,
  GenerateResponseSchema,
  GenerateStreamResponseSchema,
  GenerationService,
} from './gen/baton/v1/generation_pb.js';
import { runJobs, write } from './jobs.mjs';

const address = process.argv[3];
const transport = createGrpcTransport({ baseUrl: `http://${address}` });
const client = createClient(GenerationService, transport);

await runJobs(async (job) => {
  const request = fromJson(GenerateRequestSchema, job.request);
  const aborted = new AbortController();
  let trailers = {};
  const settings = {
    headers: job.metadata ?? {},
    signal: aborted.signal,
    timeoutMs: job.timeoutS ? 1000 * job.timeoutS : undefined,
    onTrailer: (headers) => { trailers = Object.fromEntries(headers); },
  };
  try {
    if (job.method === 'Generate') {
      const message = await client.generate(request, settings);
      write({ id: job.id, message: toJson(GenerateResponseSchema, message) });
    } else {
      let numRead = 0;
      for await (const message of client.generateStream(request, settings)) {
        write({ id: job.id, message: toJson(GenerateStreamResponseSchema, message) });
        numRead += 1;
        if (numRead === job.leaveAfter) return { left: true };
        if (numRead === job.cancelAfter) aborted.abort();
      }
    }
  } catch (reason) {
    const error = ConnectError.from(reason);
    const metadata = Object.fromEntries(error.metadata);
    return { code: error.code, details: error.rawMessage, trailers: metadata };
  }
  return { code: 0, details: '', trailers };
});
