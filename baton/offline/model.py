"""`OfflineModel`: a model that is loaded in this process; `LLM` and `AsyncLLM` use it."""

from dataclasses import dataclass

from baton.offline.chat_prompts import ChatPrompts
from baton.offline.engine_args import EngineArgs
from baton.offline.request_maker import OfflineFiles, RequestMaker
from baton.offline.tokenizer import OfflineTokenizer
from engine.loop.build import build_engine
from engine.loop.core import EngineCore

__all__ = ["OfflineModel"]


@dataclass(frozen=True, slots=True)
class OfflineModel:
    """A loaded model.

    Attributes:
        core: its engine.
        requests: makes requests for the engine.
        chats: makes chats prompts.
        tokenizer: its tokenizer, for users.
    """

    core: EngineCore
    requests: RequestMaker
    chats: ChatPrompts
    tokenizer: OfflineTokenizer

    @classmethod
    def load(cls, args: EngineArgs) -> "OfflineModel":
        """Reads the checkpoint and builds the engine.

        Raises:
            ConfigurationError: the checkpoint or an argument's value is bad.
        """
        files = OfflineFiles.load(args)
        chats = ChatPrompts(args.model, args.chat_template)
        core = build_engine(args.config)
        return cls(
            core=core,
            requests=RequestMaker(files, core.info, core.config.max_running, args.seed),
            chats=chats,
            tokenizer=OfflineTokenizer(args.model, files.tokenizer, chats, core.info.eos_token_ids),
        )
