package org.torchpi2.sample

import android.app.Activity
import android.os.Bundle as State
import android.system.Os
import android.widget.Button
import android.widget.EditText
import android.widget.LinearLayout
import android.widget.ScrollView
import android.widget.TextView
import kotlinx.coroutines.CancellationException
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.Job
import kotlinx.coroutines.MainScope
import kotlinx.coroutines.cancel
import kotlinx.coroutines.launch
import kotlinx.coroutines.sync.Mutex
import kotlinx.coroutines.sync.withLock
import kotlinx.coroutines.withContext
import org.json.JSONObject
import org.torchpi2.Bundle
import org.torchpi2.Message
import org.torchpi2.NoRoom
import org.torchpi2.Request

/** A talk with the bundle in this app's files: docs/ANDROID.md says how it gets there. */
class ChatActivity : Activity() {
    private val scope = MainScope()
    private val messages = mutableListOf<Message>()
    private var answer: Job? = null
    private lateinit var talk: TextView
    private lateinit var input: EditText
    private lateinit var send: Button
    private lateinit var figures: TextView

    override fun onCreate(state: State?) {
        super.onCreate(state)
        talk = TextView(this).apply { setTextIsSelectable(true) }
        figures = TextView(this)
        input = EditText(this)
        send = Button(this).apply { setOnClickListener { if (answer == null) ask() else answer?.cancel() } }
        val all = LinearLayout.LayoutParams(LinearLayout.LayoutParams.MATCH_PARENT, 0, 1f)
        setContentView(
            LinearLayout(this).apply {
                orientation = LinearLayout.VERTICAL
                fitsSystemWindows = true
                addView(ScrollView(context).apply { addView(talk) }, all)
                addView(figures)
                addView(input)
                addView(send)
            },
        )
        show()
        scope.launch { open() }
    }

    private suspend fun open() {
        figures.text = "loading"
        try {
            // Where the NPU's driver looks for its part of Qualcomm's libraries.
            Os.setenv("ADSP_LIBRARY_PATH", applicationInfo.nativeLibraryDir, true)
            val folder = filesDir.resolve("bundle").path
            withContext(Dispatchers.IO) {
                opening.withLock { bundle = bundle ?: Bundle(folder, budget = 2_000_000_000) }
            }
            figures.text = ""
        } catch (stopped: CancellationException) {
            throw stopped
        } catch (error: IllegalStateException) {
            figures.text = error.message
        }
        show()
    }

    private fun ask() {
        val opened = bundle ?: return
        val question = Message("user", input.text.toString())
        val said = StringBuilder()
        input.text.clear()
        talk.append("\n> ${question.content}\n")
        answer = scope.launch {
            try {
                while (true) {
                    try {
                        opened.chat(messages + question, Request(maxNewTokens = 512), ::showFigures).collect {
                            said.append(it)
                            talk.append(it)
                        }
                        break
                    } catch (full: NoRoom) {
                        if (messages.isEmpty()) throw full
                        messages.subList(0, 2).clear() // the oldest question and its answer
                    }
                }
            } catch (stopped: CancellationException) {
                throw stopped
            } catch (error: IllegalStateException) {
                figures.text = error.message
            } finally {
                // Of an answer that was stopped, what there is.
                if (said.isNotEmpty()) messages += listOf(question, Message("assistant", said.toString()))
                talk.append("\n")
                answer = null
                show()
            }
        }
        show()
    }

    private fun showFigures(report: String) {
        val found = JSONObject(report)
        val hits = if (found.isNull("hit_rate")) Double.NaN else 100 * found.getDouble("hit_rate")
        val speed = found.getDouble("tokens_per_second")
        figures.text = "%.1f tokens/s, %.1f %% of neurons in the cache".format(speed, hits)
    }

    private fun show() {
        send.isEnabled = bundle != null
        send.text = if (answer == null) "Send" else "Stop"
    }

    override fun onDestroy() {
        scope.cancel()
        super.onDestroy()
    }

    /** Of the process, and open as long as that: who leaves and comes back does not wait again. */
    private companion object {
        val opening = Mutex()

        @Volatile var bundle: Bundle? = null
    }
}
